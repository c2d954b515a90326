"""Shape of a Transformer: its sizes, parameter counts and floating-point operations."""

import collections
import dataclasses
import functools
import itertools

import numpy as np

from dtransformer.block_forms import (
    Latent,
    Placement,
    check_pattern,
    get_placement,
    has_experts,
)
from dtransformer.errors import InputError, check_int, short_repr
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.transformer_config import DECODER, ENCODER, TRANSLATION, TransformerConfig

_DENSE = "mapping", "gate", "projection"
# Names of adapted products. The second line applies to multi-head latent attention only.
_ADAPTED = (
    "query", "key", "value", "output", *_DENSE, "head",
    "latent", "query_down", "query_up", "key_value",
)  # fmt: skip

# Bytes per parameter of quantized kernels: codes, and 8 bits and a group's scale and offset per
# block of 64. `parallel.ops.block_quantization` has the formats.
_SCALE_BYTES = (1 + 2 * 4 / 256) / 64
QUANTIZED_BYTES = {"nf4": 1 / 2 + _SCALE_BYTES, "int8": 1 + _SCALE_BYTES}


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Group of identical blocks in a stack.

    Args:
        count: Number of blocks.
        length: Positions of the blocks' stream.
        attended: Tuple with the number of attended positions for each attention of a block.
        is_causal: Boolean, whether the first attention masks later positions.
        has_experts: Boolean, whether experts replace the feed-forward layer.
        is_frozen: Boolean, whether the block and everything before it is frozen.
    """

    count: int
    length: int
    attended: tuple[int, ...]
    is_causal: bool = True
    has_experts: bool = False
    is_frozen: bool = False


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Transformer that is trained on sequences of some length, for counting operations.

    Args:
        name: Name for tables and messages.
        config: `TransformerConfig` of the network.
        sequence_length: Positions s of a training sequence. With an encoder, of the target.
        source_length: Positions of the source. Defaults to `sequence_length`.
        predicted_positions: Positions per sequence with logits, such as the masked ones. `None`
            for all positions.
        num_labels: Outputs of a task head per sequence. `None` for a vocabulary head.
        frozen_blocks: Number of first blocks that are frozen together with the embedding tables.
        adapter_rank: Rank r of low-rank adapters. They freeze all other weights. 0 disables them.
        adapter_targets: Tuple of adapted products: "query", "key", "value", "output", "mapping",
            "gate", "projection" and "head". Multi-head latent attention uses the names of
            `Latent.kernels`.
        adapter_kind: "lora", or "dora" for adapters with a magnitude per output.
        base_dtype: "nf4" or "int8" if the kernels of the blocks are stored in this format under
            adapters. `None` for the dtype of the other weights.
        teacher: `ModelShape` of a frozen network that computes logits for the same sequences in every
            step. `None` without distillation.

    Raises:
        InputError: If a length or rank is out of range, or a target or format is unknown.
    """

    name: str
    config: TransformerConfig
    sequence_length: int
    source_length: int | None = None
    predicted_positions: int | None = None
    num_labels: int | None = None
    frozen_blocks: int = 0
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ("query", "value")
    adapter_kind: str = "lora"
    base_dtype: str | None = None
    teacher: "ModelShape | None" = None

    def __post_init__(self):
        if self.source_length is None:
            object.__setattr__(self, "source_length", self.sequence_length)
        self._check(1, "sequence_length", "source_length", "num_predictions")
        self._check(0, "frozen_blocks", "adapter_rank")
        for name in self.adapter_targets:
            if name not in self._adapters():
                raise InputError(
                    f"{self.name}: unknown name {short_repr(name)} in `adapter_targets`, expected "
                    f"some of {', '.join(self._adapters())}."
                )

        if self.base_dtype is not None and self.base_dtype not in QUANTIZED_BYTES:
            raise InputError(
                f"{self.name}: `base_dtype` must be one of {', '.join(QUANTIZED_BYTES)}, got "
                f"{short_repr(self.base_dtype)}."
            )
        if self.base_dtype is not None and not self.adapter_rank:
            raise InputError(f"{self.name}: `base_dtype` requires adapters. Set `adapter_rank`.")

    def _check(self, minimum, *names):
        for name in names:
            check_int(f"{self.name}: {name}", getattr(self, name), minimum)

    @property
    def num_predictions(self) -> int:
        """Number of positions per sequence with logits."""
        if self.predicted_positions is None:
            return self.sequence_length
        return self.predicted_positions

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all stacks."""
        return sum(self.config.stacks.values())

    @property
    def is_causal(self) -> bool:
        """True if a single stack masks later positions."""
        return self.config.network != ENCODER

    @property
    def num_kv_heads(self) -> int:
        """Number m of key and value heads."""
        return self.config.attention.num_kv_heads or self.config.num_heads

    @property
    def head_dim(self) -> int:
        """Features d of a head."""
        return self.config.attention.head_dim or self.config.hidden_size // self.config.num_heads

    @property
    def gated(self) -> bool:
        """True if feed-forward layers have a gate and hence three products."""
        return self.config.block.gated

    @property
    def tied_head(self) -> bool:
        """True if the head's kernel is the embedding table."""
        return self.config.head.tied_head

    @property
    def latent(self) -> Latent | None:
        """Sizes of multi-head latent attention, or `None` for plain projections."""
        return Latent.from_sizes(self.config.attention.latent)

    @property
    def experts(self) -> MoEConfig:
        """Mixture of experts. One expert means dense layers."""
        return self.config.block.moe_config or MoEConfig()

    @property
    def experts_chosen(self) -> int:
        """Number of experts per token."""
        return min(self.experts.num_experts_chosen, self.experts.expert_num)

    @property
    def expert_hidden_size(self) -> int:
        """Inner size of an expert."""
        return self.experts.ffn_hidden_size or self.config.ffn_hidden_size

    @property
    def placement(self) -> Placement:
        """Positions of the norms in a block."""
        return get_placement(vars(self.config.block))

    @functools.cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Distinct kinds of blocks with their counts, in the order of first appearance."""
        return tuple(
            dataclasses.replace(kind, count=count)
            for kind, count in collections.Counter(self._blocks()).items()
        )

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Index into `kinds` for every block of the network, in order."""
        blocks = self._blocks()
        positions = {kind: position for position, kind in enumerate(dict.fromkeys(blocks))}
        return tuple(positions[kind] for kind in blocks)

    def _blocks(self):
        """Return the kind of each block, with `count=1`."""
        s = self.sequence_length
        t = self.source_length
        kinds = {
            "num_layers": BlockKind(1, s, (s,), self.is_causal),
            "encoder_layers": BlockKind(1, t, (t,), is_causal=False),
            "decoder_layers": BlockKind(1, s, (s, t)),
        }
        may_have_experts = self.experts.expert_num > 1
        options = vars(self.config.block)
        blocks = [
            dataclasses.replace(
                kinds[stack], has_experts=may_have_experts and has_experts(options, i)
            )
            for stack, num_blocks in self.config.stacks.items()
            for i in range(num_blocks)
        ]
        first = blocks[: self.frozen_blocks]
        rest = blocks[self.frozen_blocks :]
        return [dataclasses.replace(kind, is_frozen=True) for kind in first] + rest

    def attention_kernels(self) -> dict[str, tuple[int, int]]:
        """Return a dict from the kernel names of an attention to pairs of feature counts.

        The model axis shards the second feature, except for the kernels in `Latent.DOWN`.
        """
        h = self.config.hidden_size
        n = self.config.num_heads
        d = self.head_dim
        if self.latent is not None:
            return self.latent.kernels(h, n, d)
        shared = (h, self.num_kv_heads * d)
        return {"query": (h, n * d), "key": shared, "value": shared, "output": (h, n * d)}

    def attention_parameters(self) -> int:
        """Return the number of kernel parameters of an attention, without biases."""
        return sum(x * y for x, y in self.attention_kernels().values())

    def inner_size(self, kind: BlockKind) -> int:
        """Return the inner size of a block's feed-forward layer, or of one of its experts."""
        return self.expert_hidden_size if kind.has_experts else self.config.ffn_hidden_size

    def expert_parameters(self, kind: BlockKind) -> int:
        """Return the number of kernel parameters of a feed-forward layer or of one expert."""
        return (3 if self.gated else 2) * self.config.hidden_size * self.inner_size(kind)

    def quantized_parameters(self, kind: BlockKind) -> int:
        """Return the number of parameters of a block in the format `base_dtype`, or 0.

        Kernels of routed experts also have this format, but do not count; see `experts_parameters`.
        """
        if self.base_dtype is None:
            return 0
        num_dense = self.experts.shared_experts if kind.has_experts else 1
        dense = num_dense * self.expert_parameters(kind)
        return len(kind.attended) * self.attention_parameters() + dense

    def experts_parameters(self, kind: BlockKind) -> int:
        """Return the number of kernel parameters of a block's routed experts, or 0."""
        return self.experts.expert_num * self.expert_parameters(kind) if kind.has_experts else 0

    def routed_rows(self, is_on_mesh: bool | np.ndarray) -> np.ndarray:
        """Return the number of expert rows per token of a block with experts.

        On one device this is one row per chosen expert. On a mesh it is the size of the expert
        buffers: chosen experts times capacity factor, or `num_experts` if all tokens are accepted.

        Args:
            is_on_mesh: Boolean or array of booleans, whether experts or their features are sharded.
        """
        factor = 0.0 if self.experts.dropless else self.experts.capacity_factor
        buffers = self.experts_chosen * factor or self.experts.expert_num
        return np.where(is_on_mesh, buffers, self.experts_chosen)

    def block_parameters(self, kind: BlockKind) -> int:
        """Return the number of parameters of a block, without adapters."""
        options = self.config.block
        h = self.config.hidden_size
        f = self.inner_size(kind)
        num_attentions = len(kind.attended)
        heads = self.config.num_heads * self.head_dim
        shared = self.num_kv_heads * self.head_dim
        per_expert = self.expert_parameters(kind) + options.use_bias * (
            (2 if self.gated else 1) * f + h
        )
        qkv_bias = self.config.attention.qkv_bias
        qkv_bias = options.use_bias if qkv_bias is None else qkv_bias
        biases = num_attentions * (qkv_bias * (heads + 2 * shared) + options.use_bias * h)
        total = num_attentions * self.attention_parameters() + biases
        total += int((num_attentions + 1) * self.placement.norms_per_sublayer) * self._norm()
        total += self._vector_parameters()
        if not kind.has_experts:
            return total + per_expert
        # Shared experts form one feed-forward layer with a single output bias.
        num_shared = self.experts.shared_experts
        shared_experts = num_shared * per_expert - max(num_shared - 1, 0) * options.use_bias * h
        router = h + (self.experts.router_type == "sigmoid") + self.experts.router_bias
        return total + self.experts.expert_num * (per_expert + router) + shared_experts

    def _vector_parameters(self):
        """Return the number of parameters of a block's small vectors: norms, sinks and xIELU."""
        options = self.config.attention
        n = self.config.num_heads
        d = self.head_dim
        gains = {None: 0, "rms_norm_all_heads": (n + self.num_kv_heads) * d, "layer_norm": 4 * d}
        latents = 0
        if self.latent is not None:
            latents = self.latent.kv_rank + (self.latent.query_rank or 0)
        activation = 2 * (self.config.block.hidden_act == "xielu")
        return gains.get(options.qk_norm, 2 * d) + latents + n * options.sinks + activation

    def _adapters(self):
        """Return a dict from product names to features as in `get_block_adapters`, or `None`."""
        h = self.config.hidden_size
        dense = dict.fromkeys(_DENSE, (h, self.config.ffn_hidden_size))
        products = {**self.attention_kernels(), **dense, "head": (h, self.config.vocab_size)}
        if not self.gated:
            del products["gate"]
        if self.tied_head:
            del products["head"]
        adapters = dict.fromkeys(_ADAPTED)
        for name, (x, y) in products.items():
            outputs = h if name in ("output", "projection") else y
            adapters[name] = x, y, outputs if self.adapter_kind == "dora" else 0
        return adapters

    def get_block_adapters(self, kind: BlockKind) -> list[tuple[int, int, int]]:
        """Return the products of a block that have adapters.

        Returns:
            A list of `(replicated_features, sharded_features, magnitudes)` tuples of integers.
        """
        if not self.adapter_rank or kind.is_frozen:
            return []
        adapters = self._adapters()
        counts = {**dict.fromkeys(_DENSE, not kind.has_experts), "head": 0}
        adapted = []
        for name in self.adapter_targets:
            if adapters[name] is not None:
                adapted += [adapters[name]] * counts.get(name, len(kind.attended))
        return adapted

    def adapter_parameters(self, kind: BlockKind) -> int:
        """Return the number of adapter parameters of a block."""
        return self._count_adapters(self.get_block_adapters(kind))

    def _count_adapters(self, products):
        return sum(self.adapter_rank * (x + y) + magnitudes for x, y, magnitudes in products)

    def _norm(self):
        has_shift = self.config.block.norm in ("layer_norm", "layer_norm_unit_offset")
        return self.config.hidden_size * (2 if has_shift else 1)

    def _learned_positions(self):
        """Return the total number of rows in all position tables."""
        options = self.config.embedding
        if options.positions != "learned":
            return 0
        if self.config.network == TRANSLATION:
            return options.max_source_length + options.max_length
        return (options.max_length + options.position_offset) * len(self.config.stacks)

    def embedding_parameters(self) -> int:
        """Return the number of parameters in the token and position tables."""
        return self.config.hidden_size * (self.config.vocab_size + self._learned_positions())

    def head_parameters(self) -> int:
        """Return the number of parameters of an untied head and of the norms after stacks."""
        final_norms = 0 if self.placement.of_sum else len(self.config.stacks)
        kernel = 0 if self.tied_head else self.config.hidden_size * self.config.vocab_size
        return final_norms * self._norm() + kernel

    def other_parameters(self) -> int:
        """Return the number of parameters outside blocks, embedding tables and the head.

        The result can be negative, because it subtracts norms that some blocks lack.
        """
        config = self.config
        h = config.hidden_size
        total = config.vocab_size * config.head.head_bias
        num_stacks = len(config.stacks)
        if config.network == TRANSLATION and not config.embedding.shared_embeddings:
            total += h * config.embedding.source_vocab_size
        total += 2 * h * num_stacks * config.embedding.embedding_norm
        if config.embedding.positions == "relative":
            total += num_stacks * config.num_heads * config.embedding.relative_ranges
        if config.network in (DECODER, ENCODER):
            pattern = check_pattern(config.block.block_pattern)
            lacks_norm = [not block.get("attention_norm", True) for block in pattern]
            missing = sum(lacks_norm[i % len(pattern)] for i in range(config.num_layers))
            total -= self._norm() * missing
        if config.network == ENCODER:
            biases = h * config.block.use_bias
            total += 2 * self._norm() + h * config.embedding.num_token_types
            total += h * h + biases + config.vocab_size
            total += config.head.next_sentence * (h * h + h + 2 * h + 2)
        return total

    def parameters(self) -> int:
        """Return the total number of parameters, without adapters.

        Example:

        >>> from dtransformer.planner.models import get_model
        >>> f"{get_model('gpt_175b').parameters() / 1e9:.1f} billion"
        '174.6 billion'
        """
        blocks = sum(kind.count * self.block_parameters(kind) for kind in self.kinds)
        other_parameters = (
            self.embedding_parameters() + self.head_parameters() + self.other_parameters()
        )
        return blocks + other_parameters

    def trains(self, kind: BlockKind) -> bool:
        """Return whether the weights of a block are trained, not counting adapters."""
        return not (kind.is_frozen or self.adapter_rank)

    @property
    def is_frozen(self) -> bool:
        """True if no weight is trained."""
        return self.trained_parameters() == 0

    def as_teacher(self) -> "ModelShape":
        """Return the shape with all weights frozen."""
        # Adapters freeze all other weights, and without targets there are no adapters.
        return dataclasses.replace(
            self, frozen_blocks=self.num_blocks, adapter_rank=1, adapter_targets=()
        )

    @property
    def trains_tables(self) -> bool:
        """True if the embedding tables are trained."""
        return not (self.adapter_rank or self.frozen_blocks)

    def trained_parameters(self) -> int:
        """Return the number of trained parameters.

        With adapters these are only the adapters' parameters, otherwise all that are not frozen.

        Example:

        >>> from dtransformer.planner.models import get_model
        >>> get_model("llama2_7b", adapter_rank=8).trained_parameters()
        4194304
        """
        if self.adapter_rank:
            blocks = sum(kind.count * self.adapter_parameters(kind) for kind in self.kinds)
            head = self._adapters()["head"]
            has_head = head is not None and "head" in self.adapter_targets
            return blocks + self._count_adapters([head] if has_head else [])
        frozen = sum(k.count * self.block_parameters(k) for k in self.kinds if not self.trains(k))
        tables = 0 if self.trains_tables else self.embedding_parameters() + self.other_parameters()
        return self.parameters() - frozen - tables

    def flops_per_sequence(self) -> float:
        """Return the floating-point operations per sequence of a step, without recomputation.

        Each position and weight of a product counts six operations. A weight that is frozen by
        adapters counts four, a weight of a frozen block or of a teacher two. The attention scores are
        added.
        """
        flops_per_weight = 4.0 if self.adapter_rank else 6.0
        if self.is_frozen:
            flops_per_weight = 2.0
        h = self.config.hidden_size
        heads = self.config.num_heads * self.head_dim
        kernels = self.attention_kernels()
        active = self.experts_chosen + self.experts.shared_experts
        flops = 0.0 if self.teacher is None else self.teacher.as_teacher().flops_per_sequence()
        for kind in self.kinds:
            weights = (active if kind.has_experts else 1) * self.expert_parameters(kind)
            products = kind.length * (weights + kind.has_experts * self.experts.expert_num * h)
            for t, (name, (x, y)) in itertools.product(kind.attended, kernels.items()):
                products += (t if name in ("key", "value") else kind.length) * x * y
            scores = 2 * kind.length * heads * sum(kind.attended)
            if kind.is_frozen:
                block_flops = 2.0 * (products + scores)
            else:
                block_flops = flops_per_weight * products + 6.0 * scores
            flops += kind.count * block_flops
        return flops + flops_per_weight * self._head_products()

    def _head_products(self):
        """Return the number of multiplications of the head per sequence."""
        config = self.config
        h = config.hidden_size
        if self.num_labels is not None:
            return h * self.num_labels
        if config.network != ENCODER:
            return self.num_predictions * h * config.vocab_size
        # A MaskedLM has a dense layer before the logits. Its sentence-pair head has two.
        pair = h * (h + 2) * config.head.next_sentence
        return self.num_predictions * h * (h + config.vocab_size) + pair
