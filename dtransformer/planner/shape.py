"""The shape of a Transformer, as numbers: what its parameters and its products are counted from."""

import collections
import dataclasses
import functools
import itertools
import math

import numpy as np

from dtransformer.block_forms import Latent
from dtransformer.errors import InputError, check_int, shown

_DENSE = "mapping", "gate", "projection"
# What may have adapters; the last ones are there where attention is through latents alone.
_ADAPTED = (
    *("query", "key", "value", "output", *_DENSE, "head"),
    *("latent", "query_down", "query_up", "key_value"),
)


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Blocks of a stack that are alike.

    Args:
        number: how many.
        length: positions of their stream.
        attended: what each attention of a block attends to, in positions.
        is_causal: whether the first attention sees what was before only.
        has_experts: whether experts take the place of the feed-forward layer.
        is_frozen: whether it is not trained, nor anything before it.
    """

    number: int
    length: int
    attended: tuple[int, ...]
    is_causal: bool = True
    has_experts: bool = False
    is_frozen: bool = False


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Transformer as the planner sees it.

    A network has one stack of `num_layers` blocks, or an encoder and a decoder.

    Args:
        name: what it is called in tables.
        hidden_size: features h of the residual stream.
        num_heads: number n of attention heads.
        ffn_hidden_size: inner size f of the feed-forward layers; 4·h by default.
        vocab_size: number V of pieces.
        sequence_length: positions s of a sequence in training; of a target with an encoder.
        num_layers: blocks of the one stack.
        encoder_layers, decoder_layers: blocks of an encoder and a decoder.
        source_length: positions of a source; `sequence_length` by default.
        num_kv_heads: number m of heads of keys and values; n by default.
        head_dim: features d of a head; h / n by default.
        gated: whether feed-forward layers have a gate, and so three products.
        use_bias: whether products have biases.
        qkv_bias: whether queries, keys and values have; `use_bias` by default.
        rms_norm: whether norms have a scale only.
        tied_head: whether the head's kernel is the embeddings' table.
        learned_positions: entries of tables of positions, of all of them together.
        final_norms: norms after stacks of blocks; blocks that normalize last have none.
        other_parameters: what else there is: poolers, norms of embeddings, token types.
        head_products: how many numbers the head multiplies for a sequence; s·h·V by default.
        is_causal: whether the one stack sees what was before only.
        num_experts: experts that take the place of a feed-forward layer.
        experts_chosen: experts that each token is sent to.
        experts_every: which blocks of a stack have experts: every so many, the last of them.
        shared_experts: experts that every token is sent to besides.
        router_biases: number of biases of the router for each expert: of its choice, of its logits.
        expert_hidden_size: inner size of an expert; f by default.
        dense_blocks: numbers of the blocks of the one stack that have no experts, from 0.
        sublayer_norms: number of norms of each sublayer: 2 where its output has one, too, 0.5 where
            attention and the feed-forward layer share one.
        other_block_parameters: of a block, what else there is: norms of queries and keys, sinks.
        capacity_factor: tokens an expert takes, as a multiple of an even share; 0 for all.
        frozen_blocks: how many of the first blocks are not trained, nor the tables of embeddings.
        adapter_rank: rank r of low-rank adapters, beside which all is frozen; 0 for none.
        adapter_kind: `"dora"` for adapters with a magnitude of each output, too.
        adapter_targets: what has adapters: "query", "key", "value", "output", or of attention through
            latents the names of `Latent.kernels`; "mapping", "gate" and "projection" of feed-forward
            layers; "head".
        latent: sizes of attention through latents; None for attention of plain projections.

    Raises:
        InputError: a size is not a positive integer, or one does not divide another that it has to.
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
                f"{self.name}: num_heads={self.num_heads} does not divide "
                f"hidden_size={self.hidden_size}: change one, or set head_dim"
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
                    f"{self.name}: adapter_targets has {shown(name)}, expected some of "
                    f"{', '.join(self._adapters())}"
                )
        if self.experts_chosen > self.num_experts:
            raise InputError(
                f"{self.name}: experts_chosen={self.experts_chosen} is more than "
                f"num_experts={self.num_experts}"
            )
        if (self.num_layers > 0) == (self.num_blocks > self.num_layers):
            what = "both kinds of" if self.num_layers else "zero"
            raise InputError(
                f"{self.name}: has {what} layers: set num_layers, or encoder_layers and decoder_layers"
            )

    def _check(self, least, *names):
        for name in names:
            check_int(f"{self.name}: {name}", getattr(self, name), least)

    @property
    def num_blocks(self) -> int:
        """The number of all blocks."""
        return self.num_layers + self.encoder_layers + self.decoder_layers

    @functools.cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The unlike blocks, in the order of the first of each."""
        return tuple(
            dataclasses.replace(kind, number=number)
            for kind, number in collections.Counter(self._blocks()).items()
        )

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Of every block of the network, in order, the position of its kind in `kinds`."""
        blocks = self._blocks()
        places = {kind: place for place, kind in enumerate(dict.fromkeys(blocks))}
        return tuple(places[kind] for kind in blocks)

    def _blocks(self):
        """Return the kind of every block, by itself."""
        s, t = self.sequence_length, self.source_length
        stacks = (
            (self.num_layers, BlockKind(1, s, (s,), self.is_causal)),
            (self.encoder_layers, BlockKind(1, t, (t,), is_causal=False)),
            (self.decoder_layers, BlockKind(1, s, (s, t))),
        )
        every = self.experts_every if self.num_experts > 1 else math.inf
        blocks = [
            dataclasses.replace(
                kind, has_experts=number % every == 0 and number - 1 not in self.dense_blocks
            )
            for num_blocks, kind in stacks
            for number in range(1, num_blocks + 1)
        ]
        first, rest = blocks[: self.frozen_blocks], blocks[self.frozen_blocks :]
        return [dataclasses.replace(kind, is_frozen=True) for kind in first] + rest

    def attention_kernels(self) -> dict[str, tuple[int, int]]:
        """Return the kernels of an attention by their names, as pairs of features.

        The second ones may be sharded, but for kernels `DOWN` of a `Latent`.
        """
        h, n, d = self.hidden_size, self.num_heads, self.head_dim
        if self.latent is not None:
            return self.latent.kernels(h, n, d)
        shared = (h, self.num_kv_heads * d)
        return {"query": (h, n * d), "key": shared, "value": shared, "output": (h, n * d)}

    def attention_parameters(self) -> int:
        """Return the parameters of the products of an attention."""
        return sum(x * y for x, y in self.attention_kernels().values())

    def inner_size(self, kind: BlockKind) -> int:
        """Return the inner size of a block's feed-forward layer, or of one of its experts."""
        return self.expert_hidden_size if kind.has_experts else self.ffn_hidden_size

    def expert_parameters(self, kind: BlockKind) -> int:
        """Return the parameters of the products of a feed-forward layer, of one expert."""
        return (3 if self.gated else 2) * self.hidden_size * self.inner_size(kind)

    def experts_parameters(self, kind: BlockKind) -> int:
        """Return the parameters of the products of a block's experts that can be sharded."""
        return self.num_experts * self.expert_parameters(kind) if kind.has_experts else 0

    def routed_rows(self, is_on_mesh: bool | np.ndarray) -> np.ndarray:
        """Return how many rows experts compute for a token of a block that has them.

        On one device none is padded: one for each choice, at most. On a mesh those of the buffers.

        Args:
            is_on_mesh: whether experts or their features are sharded; or an array of that.
        """
        buffers = self.experts_chosen * self.capacity_factor or self.num_experts
        return np.where(is_on_mesh, buffers, self.experts_chosen)

    def block_parameters(self, kind: BlockKind) -> int:
        """Return the parameters of a block."""
        h, f, number = self.hidden_size, self.inner_size(kind), len(kind.attended)
        heads, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        each = self.expert_parameters(kind) + self.use_bias * ((2 if self.gated else 1) * f + h)
        qkv_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        biases = number * (qkv_bias * (heads + 2 * shared) + self.use_bias * h)
        found = number * self.attention_parameters() + biases
        found += int((number + 1) * self.sublayer_norms) * self._norm()
        found += self.other_block_parameters
        if not kind.has_experts:
            return found + each
        # A shared expert is a part of one feed-forward layer, which has one bias of its outputs.
        common = self.shared_experts * each - max(self.shared_experts - 1, 0) * self.use_bias * h
        router = h + self.router_biases
        return found + self.num_experts * (each + router) + common

    def _adapters(self):
        """Return the products that may have adapters, of each kind; see `adapters_of_block`."""
        h, dense = self.hidden_size, dict.fromkeys(_DENSE, (self.hidden_size, self.ffn_hidden_size))
        found = {**self.attention_kernels(), **dense, "head": (h, self.vocab_size)}
        is_there = {"gate": self.gated, "head": not self.tied_head}
        has_magnitudes, to_stream = self.adapter_kind == "dora", ("output", "projection")
        return dict.fromkeys(_ADAPTED, ()) | {
            name: ((x, y, (h if name in to_stream else y) * has_magnitudes),)
            * is_there.get(name, True)
            for name, (x, y) in found.items()
        }

    def adapters_of_block(self, kind: BlockKind) -> list[tuple[int, int, int]]:
        """Return the products of a block that have adapters.

        A list of (features that are replicated, those that may be sharded, magnitudes).
        """
        if not self.adapter_rank or kind.is_frozen:
            return []
        found, times = self._adapters(), dict.fromkeys(_DENSE, not kind.has_experts)
        times["head"] = 0
        return [
            x
            for name in self.adapter_targets
            for x in found[name] * times.get(name, len(kind.attended))
        ]

    def adapter_parameters(self, kind: BlockKind) -> int:
        """Return the parameters of the adapters of a block."""
        return self._adapter_numbers(self.adapters_of_block(kind))

    def _adapter_numbers(self, products):
        return sum(self.adapter_rank * (x + y) + magnitudes for x, y, magnitudes in products)

    def _norm(self):
        return self.hidden_size * (1 if self.rms_norm else 2)

    def embedding_parameters(self) -> int:
        """Return the parameters of the tables of pieces and positions."""
        return self.hidden_size * (self.vocab_size + self.learned_positions)

    def head_parameters(self) -> int:
        """Return the parameters of a head of its own, and of the norms after stacks."""
        return self.final_norms * self._norm() + (
            0 if self.tied_head else self.hidden_size * self.vocab_size
        )

    def parameters(self) -> int:
        """Return the number of parameters.

        Example:

        >>> from dtransformer.planner.models import named
        >>> f"{named('gpt_175b').parameters() / 1e9:.1f} billion"
        '174.6 billion'
        """
        blocks = sum(kind.number * self.block_parameters(kind) for kind in self.kinds)
        own = self.embedding_parameters() + self.head_parameters() + self.other_parameters
        return blocks + own

    def trains(self, kind: BlockKind) -> bool:
        """Return whether the weights of a block are trained themselves."""
        return not (kind.is_frozen or self.adapter_rank)

    @property
    def trains_tables(self) -> bool:
        """Whether tables of embeddings are trained."""
        return not (self.adapter_rank or self.frozen_blocks)

    def trained_parameters(self) -> int:
        """Return the number of parameters that are trained, adapters among them.

        Example:

        >>> from dtransformer.planner.models import named
        >>> named("llama2_7b", adapter_rank=8).trained_parameters()
        4194304
        """
        if self.adapter_rank:
            head = self._adapters()["head"] * ("head" in self.adapter_targets)
            blocks = sum(kind.number * self.adapter_parameters(kind) for kind in self.kinds)
            return blocks + self._adapter_numbers(head)
        frozen = sum(k.number * self.block_parameters(k) for k in self.kinds if not self.trains(k))
        tables = 0 if self.trains_tables else self.embedding_parameters() + self.other_parameters
        return self.parameters() - frozen - tables

    def flops_per_sequence(self) -> float:
        """Return the floating-point operations of a training step without recompute, a sequence.

        Six for each position and weight in a product, and those of the attention cores; four of a
        weight that is frozen, two where nothing before it is trained.
        """
        own = 4.0 if self.adapter_rank else 6.0
        h, heads = self.hidden_size, self.num_heads * self.head_dim
        kernels, active = self.attention_kernels(), self.experts_chosen + self.shared_experts
        flops = 0.0
        for kind in self.kinds:
            weights = (active if kind.has_experts else 1) * self.expert_parameters(kind)
            products = kind.length * (weights + kind.has_experts * self.num_experts * h)
            for t, (name, (x, y)) in itertools.product(kind.attended, kernels.items()):
                products += (t if name in ("key", "value") else kind.length) * x * y
            scores = 2 * kind.length * heads * sum(kind.attended)
            each = 2.0 * (products + scores) if kind.is_frozen else own * products + 6.0 * scores
            flops += kind.number * each
        head = self.sequence_length * h * self.vocab_size
        return flops + own * (head if self.head_products is None else self.head_products)
