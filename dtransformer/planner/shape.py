"""Shape of a Transformer: its sizes, parameter counts and floating-point operations."""

import collections
import dataclasses
import functools
import itertools
import math

import numpy as np

from dtransformer.block_forms import Latent
from dtransformer.errors import InputError, check_int, shown

_DENSE = "mapping", "gate", "projection"
# Names of adapted products. The second line applies to multi-head latent attention only.
_ADAPTED = (
    "query", "key", "value", "output", *_DENSE, "head",
    "latent", "query_down", "query_up", "key_value",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Group of identical blocks in a stack.

    Args:
        number: Number of blocks.
        length: Positions of the blocks' stream.
        attended: Tuple with the number of attended positions for each attention of a block.
        is_causal: Boolean, whether the first attention masks later positions.
        has_experts: Boolean, whether experts replace the feed-forward layer.
        is_frozen: Boolean, whether the block and everything before it is frozen.
    """

    number: int
    length: int
    attended: tuple[int, ...]
    is_causal: bool = True
    has_experts: bool = False
    is_frozen: bool = False


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a Transformer, for counting parameters and operations.

    A network has either one stack of `num_layers` blocks, or an encoder and a decoder.

    Args:
        name: Name for tables and messages.
        hidden_size: Features h of the residual stream.
        num_heads: Number n of attention heads.
        ffn_hidden_size: Inner size f of the feed-forward layers. Defaults to 4·h.
        vocab_size: Vocabulary size V.
        sequence_length: Positions s of a training sequence. With an encoder, of the target.
        num_layers: Blocks of a single stack.
        encoder_layers, decoder_layers: Blocks of an encoder and a decoder.
        source_length: Positions of the source. Defaults to `sequence_length`.
        num_kv_heads: Number m of key and value heads. Defaults to n.
        head_dim: Features d of a head. Defaults to h / n.
        gated: Boolean, whether feed-forward layers have a gate and hence three products.
        use_bias: Boolean, whether products have biases.
        qkv_bias: Boolean, whether queries, keys and values have biases. Defaults to `use_bias`.
        rms_norm: Boolean, whether norms have only a scale.
        tied_head: Boolean, whether the head's kernel is the embedding table.
        learned_positions: Total number of rows in all position tables.
        final_norms: Number of norms after stacks. Post-norm stacks have none.
        other_parameters: Number of other parameters: poolers, embedding norms, token types.
        head_products: Multiplications of the head per sequence. Defaults to s·h·V.
        is_causal: Boolean, whether a single stack masks later positions.
        num_experts: Number of experts that replace a feed-forward layer. 1 means a dense layer.
        experts_chosen: Number of experts per token.
        experts_every: The last of every `experts_every` blocks of a stack has experts.
        shared_experts: Number of experts that receive every token.
        router_biases: Number of router biases per expert, for its selection and its logits.
        expert_hidden_size: Inner size of an expert. Defaults to f.
        dense_blocks: Tuple of block indices of a single stack that have no experts.
        sublayer_norms: Number of norms per sublayer. 2 if the output also has a norm, 0.5 if
            attention and the feed-forward layer share one.
        other_block_parameters: Other parameters per block: norms of queries and keys, sinks.
        capacity_factor: Capacity of an expert relative to an even share. 0 accepts all tokens.
        frozen_blocks: Number of first blocks that are frozen together with the embedding tables.
        adapter_rank: Rank r of low-rank adapters. They freeze all other weights. 0 disables them.
        adapter_targets: Tuple of adapted products: "query", "key", "value", "output", "mapping",
            "gate", "projection" and "head". Multi-head latent attention uses the names of
            `Latent.kernels`.
        adapter_kind: "lora", or "dora" for adapters with a magnitude per output.
        latent: `Latent` sizes of multi-head latent attention. `None` uses plain projections.

    Raises:
        InputError: If a size is not a positive integer, or if sizes contradict each other.
    """

    name: str
    hidden_size: int
    num_heads: int
    vocab_size: int
    sequence_length: int
    ffn_hidden_size: int | None = None
    num_layers: int = 0
    encoder_layers: int = 0
    decoder_layers: int = 0
    source_length: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    use_bias: bool = True
    qkv_bias: bool | None = None
    rms_norm: bool = False
    tied_head: bool = True
    learned_positions: int = 0
    final_norms: int = 1
    other_parameters: int = 0
    head_products: int | None = None
    is_causal: bool = True
    num_experts: int = 1
    experts_chosen: int = 1
    experts_every: int = 1
    shared_experts: int = 0
    router_biases: int = 0
    expert_hidden_size: int | None = None
    dense_blocks: tuple[int, ...] = ()
    sublayer_norms: float = 1
    other_block_parameters: int = 0
    capacity_factor: float = 1.0
    frozen_blocks: int = 0
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ("query", "value")
    adapter_kind: str = "lora"
    latent: Latent | None = None

    def __post_init__(self):
        defaults = {
            "ffn_hidden_size": lambda: 4 * self.hidden_size,
            "num_kv_heads": lambda: self.num_heads,
            "expert_hidden_size": lambda: self.ffn_hidden_size,
            "source_length": lambda: self.sequence_length,
            "head_dim": lambda: self.hidden_size // self.num_heads,
        }
        self._check(1, "hidden_size", "num_heads", "vocab_size", "sequence_length")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InputError(
                f"{self.name}: `num_heads={self.num_heads}` does not divide "
                f"`hidden_size={self.hidden_size}`. Change one of them or set `head_dim`."
            )
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default())
        self._check(1, *defaults, "num_experts", "experts_chosen", "experts_every")
        self._check(0, "num_layers", "encoder_layers", "decoder_layers", "learned_positions")
        self._check(0, "shared_experts", "frozen_blocks", "adapter_rank")
        for name in self.adapter_targets:
            if name not in self._adapters():
                raise InputError(
                    f"{self.name}: unknown name {shown(name)} in `adapter_targets`, expected "
                    f"some of {', '.join(self._adapters())}."
                )
        if self.experts_chosen > self.num_experts:
            raise InputError(
                f"{self.name}: `experts_chosen={self.experts_chosen}` must not exceed "
                f"`num_experts={self.num_experts}`."
            )
        if (self.num_layers > 0) == (self.num_blocks > self.num_layers):
            what = "two kinds of layers" if self.num_layers else "no layers"
            raise InputError(
                f"{self.name}: the model has {what}. Set either `num_layers`, or `encoder_layers` "
                "and `decoder_layers`."
            )

    def _check(self, minimum, *names):
        for name in names:
            check_int(f"{self.name}: {name}", getattr(self, name), minimum)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all stacks."""
        return self.num_layers + self.encoder_layers + self.decoder_layers

    @functools.cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Distinct kinds of blocks with their counts, in the order of first appearance."""
        return tuple(
            dataclasses.replace(kind, number=number)
            for kind, number in collections.Counter(self._blocks()).items()
        )

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Index into `kinds` for every block of the network, in order."""
        blocks = self._blocks()
        positions = {kind: position for position, kind in enumerate(dict.fromkeys(blocks))}
        return tuple(positions[kind] for kind in blocks)

    def _blocks(self):
        """Return the kind of each block, with `number=1`."""
        s = self.sequence_length
        t = self.source_length
        stacks = (
            (self.num_layers, BlockKind(1, s, (s,), self.is_causal)),
            (self.encoder_layers, BlockKind(1, t, (t,), is_causal=False)),
            (self.decoder_layers, BlockKind(1, s, (s, t))),
        )
        every = self.experts_every if self.num_experts > 1 else math.inf
        blocks = [
            dataclasses.replace(kind, has_experts=i % every == 0 and i - 1 not in self.dense_blocks)
            for num_blocks, kind in stacks
            for i in range(1, num_blocks + 1)
        ]
        first = blocks[: self.frozen_blocks]
        rest = blocks[self.frozen_blocks :]
        return [dataclasses.replace(kind, is_frozen=True) for kind in first] + rest

    def attention_kernels(self) -> dict[str, tuple[int, int]]:
        """Return a dict from the kernel names of an attention to pairs of feature counts.

        The model axis shards the second feature, except for the kernels in `Latent.DOWN`.
        """
        h = self.hidden_size
        n = self.num_heads
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
        return self.expert_hidden_size if kind.has_experts else self.ffn_hidden_size

    def expert_parameters(self, kind: BlockKind) -> int:
        """Return the number of kernel parameters of a feed-forward layer or of one expert."""
        return (3 if self.gated else 2) * self.hidden_size * self.inner_size(kind)

    def experts_parameters(self, kind: BlockKind) -> int:
        """Return the number of kernel parameters of a block's routed experts, or 0."""
        return self.num_experts * self.expert_parameters(kind) if kind.has_experts else 0

    def routed_rows(self, is_on_mesh: bool | np.ndarray) -> np.ndarray:
        """Return the number of expert rows per token of a block with experts.

        On one device this is one row per chosen expert. On a mesh it is the size of the expert
        buffers: chosen experts times capacity factor, or `num_experts` if all tokens are accepted.

        Args:
            is_on_mesh: Boolean or array of booleans, whether experts or their features are sharded.
        """
        buffers = self.experts_chosen * self.capacity_factor or self.num_experts
        return np.where(is_on_mesh, buffers, self.experts_chosen)

    def block_parameters(self, kind: BlockKind) -> int:
        """Return the number of parameters of a block, without adapters."""
        h = self.hidden_size
        f = self.inner_size(kind)
        num_attentions = len(kind.attended)
        heads = self.num_heads * self.head_dim
        shared = self.num_kv_heads * self.head_dim
        per_expert = self.expert_parameters(kind) + self.use_bias * (
            (2 if self.gated else 1) * f + h
        )
        qkv_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        biases = num_attentions * (qkv_bias * (heads + 2 * shared) + self.use_bias * h)
        total = num_attentions * self.attention_parameters() + biases
        total += int((num_attentions + 1) * self.sublayer_norms) * self._norm()
        total += self.other_block_parameters
        if not kind.has_experts:
            return total + per_expert
        # Shared experts form one feed-forward layer with a single output bias.
        shared_experts = (
            self.shared_experts * per_expert - max(self.shared_experts - 1, 0) * self.use_bias * h
        )
        router = h + self.router_biases
        return total + self.num_experts * (per_expert + router) + shared_experts

    def _adapters(self):
        """Return a dict from product names to features as in `adapters_of_block`, or `None`."""
        h = self.hidden_size
        dense = dict.fromkeys(_DENSE, (h, self.ffn_hidden_size))
        products = {**self.attention_kernels(), **dense, "head": (h, self.vocab_size)}
        if not self.gated:
            del products["gate"]
        if self.tied_head:
            del products["head"]
        adapters = dict.fromkeys(_ADAPTED)
        for name, (x, y) in products.items():
            outputs = h if name in ("output", "projection") else y
            adapters[name] = x, y, outputs if self.adapter_kind == "dora" else 0
        return adapters

    def adapters_of_block(self, kind: BlockKind) -> list[tuple[int, int, int]]:
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
        return self._count_adapters(self.adapters_of_block(kind))

    def _count_adapters(self, products):
        return sum(self.adapter_rank * (x + y) + magnitudes for x, y, magnitudes in products)

    def _norm(self):
        return self.hidden_size * (1 if self.rms_norm else 2)

    def embedding_parameters(self) -> int:
        """Return the number of parameters in the token and position tables."""
        return self.hidden_size * (self.vocab_size + self.learned_positions)

    def head_parameters(self) -> int:
        """Return the number of parameters of an untied head and of the norms after stacks."""
        return self.final_norms * self._norm() + (
            0 if self.tied_head else self.hidden_size * self.vocab_size
        )

    def parameters(self) -> int:
        """Return the total number of parameters, without adapters.

        Example:

        >>> from dtransformer.planner.models import named
        >>> f"{named('gpt_175b').parameters() / 1e9:.1f} billion"
        '174.6 billion'
        """
        blocks = sum(kind.number * self.block_parameters(kind) for kind in self.kinds)
        other_parameters = (
            self.embedding_parameters() + self.head_parameters() + self.other_parameters
        )
        return blocks + other_parameters

    def trains(self, kind: BlockKind) -> bool:
        """Return whether the weights of a block are trained, not counting adapters."""
        return not (kind.is_frozen or self.adapter_rank)

    @property
    def trains_tables(self) -> bool:
        """True if the embedding tables are trained."""
        return not (self.adapter_rank or self.frozen_blocks)

    def trained_parameters(self) -> int:
        """Return the number of trained parameters.

        With adapters these are only the adapters' parameters, otherwise all that are not frozen.

        Example:

        >>> from dtransformer.planner.models import named
        >>> named("llama2_7b", adapter_rank=8).trained_parameters()
        4194304
        """
        if self.adapter_rank:
            blocks = sum(kind.number * self.adapter_parameters(kind) for kind in self.kinds)
            head = self._adapters()["head"]
            has_head = head is not None and "head" in self.adapter_targets
            return blocks + self._count_adapters([head] if has_head else [])
        frozen = sum(k.number * self.block_parameters(k) for k in self.kinds if not self.trains(k))
        tables = 0 if self.trains_tables else self.embedding_parameters() + self.other_parameters
        return self.parameters() - frozen - tables

    def flops_per_sequence(self) -> float:
        """Return the floating-point operations per sequence of a step, without recomputation.

        Each position and weight of a product counts six operations. A weight that is frozen by
        adapters counts four, a weight of a frozen block two. The attention scores are added.
        """
        flops_per_weight = 4.0 if self.adapter_rank else 6.0
        h = self.hidden_size
        heads = self.num_heads * self.head_dim
        kernels = self.attention_kernels()
        active = self.experts_chosen + self.shared_experts
        flops = 0.0
        for kind in self.kinds:
            weights = (active if kind.has_experts else 1) * self.expert_parameters(kind)
            products = kind.length * (weights + kind.has_experts * self.num_experts * h)
            for t, (name, (x, y)) in itertools.product(kind.attended, kernels.items()):
                products += (t if name in ("key", "value") else kind.length) * x * y
            scores = 2 * kind.length * heads * sum(kind.attended)
            if kind.is_frozen:
                block_flops = 2.0 * (products + scores)
            else:
                block_flops = flops_per_weight * products + 6.0 * scores
            flops += kind.number * block_flops
        head = self.head_products
        if head is None:
            head = self.sequence_length * h * self.vocab_size
        return flops + flops_per_weight * head
