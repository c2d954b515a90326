"""The shape of a Transformer, as numbers: what its parameters and its products are counted from."""

import dataclasses
import difflib
from collections.abc import Mapping

from dtransformer.architectures import ARCHITECTURES, Architecture
from dtransformer.errors import InputError, shown

_DEFAULT_LENGTH = 512  # of what is trained, where positions have no limit


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """Blocks that are alike, which follow each other.

    Args:
        number: how many.
        length: positions of their stream.
        attended: what each attention of a block attends to, in positions.
        is_causal: whether the first attention sees what was before only.
    """

    number: int
    length: int
    attended: tuple[int, ...]
    is_causal: bool = True


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
        rms_norm: whether norms have a scale only.
        tied_head: whether the head's kernel is the embeddings' table.
        learned_positions: entries of tables of positions, of all of them together.
        other_parameters: what else there is: poolers, norms of embeddings, token types.
        is_causal: whether the one stack sees what was before only.
        num_experts: experts of each feed-forward layer.
        experts_chosen: experts that each token is sent to.
        capacity_factor: tokens an expert takes, as a multiple of an even share.

    Raises:
        InputError: a size is not a positive integer, or heads do not divide it.
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
    rms_norm: bool = False
    tied_head: bool = True
    learned_positions: int = 0
    other_parameters: int = 0
    is_causal: bool = True
    num_experts: int = 1
    experts_chosen: int = 1
    capacity_factor: float = 1.0

    def __post_init__(self):
        defaults = {
            "ffn_hidden_size": lambda: 4 * self.hidden_size,
            "num_kv_heads": lambda: self.num_heads,
            "source_length": lambda: self.sequence_length,
        }
        for name in ("hidden_size", "num_heads", "vocab_size", "sequence_length"):
            self._check(name, 1)
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default())
            self._check(name, 1)
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise InputError(
                    f"{self.name}: num_heads={self.num_heads} does not divide "
                    f"hidden_size={self.hidden_size}: change one, or set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for name in ("num_layers", "encoder_layers", "decoder_layers", "learned_positions"):
            self._check(name, 0)
        for name in ("head_dim", "num_experts", "experts_chosen"):
            self._check(name, 1)
        if self.num_blocks == 0:
            raise InputError(
                f"{self.name}: has zero layers: set num_layers, or encoder_layers and decoder_layers"
            )
        if self.num_layers and self.encoder_layers + self.decoder_layers:
            raise InputError(
                f"{self.name}: has num_layers={self.num_layers} and an encoder or a decoder: give "
                "num_layers, or encoder_layers and decoder_layers"
            )

    def _check(self, name, least):
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise InputError(
                f"{self.name}: {name} must be an integer of at least {least}, got {shown(value)}"
            )

    @property
    def num_blocks(self) -> int:
        """The number of all blocks."""
        return self.num_layers + self.encoder_layers + self.decoder_layers

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The blocks, in the network's order."""
        s, t = self.sequence_length, self.source_length
        kinds = (
            BlockKind(self.num_layers, s, (s,), self.is_causal),
            BlockKind(self.encoder_layers, t, (t,), is_causal=False),
            BlockKind(self.decoder_layers, s, (s, t) if self.encoder_layers else (s,)),
        )
        return tuple(kind for kind in kinds if kind.number)

    def attention_parameters(self) -> int:
        """Return the parameters of the products of an attention."""
        heads, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 2 * self.hidden_size * (heads + shared)

    def expert_parameters(self) -> int:
        """Return the parameters of the products of a feed-forward layer, of one expert."""
        return (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size

    def block_parameters(self, kind: BlockKind) -> int:
        """Return the parameters of a block."""
        h, f, number = self.hidden_size, self.ffn_hidden_size, len(kind.attended)
        heads, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        products = number * self.attention_parameters()
        products += self.num_experts * self.expert_parameters()
        biases = number * (heads + 2 * shared + h)
        biases += self.num_experts * ((2 if self.gated else 1) * f + h)
        router = h * self.num_experts if self.num_experts > 1 else 0
        return products + self.use_bias * biases + router + (number + 1) * self._norm()

    def _norm(self):
        return self.hidden_size * (1 if self.rms_norm else 2)

    def embedding_parameters(self) -> int:
        """Return the parameters of the tables of pieces and positions."""
        return self.hidden_size * (self.vocab_size + self.learned_positions)

    def head_parameters(self) -> int:
        """Return the parameters of a head of its own, and of the norm before it."""
        return self._norm() + (0 if self.tied_head else self.hidden_size * self.vocab_size)

    def parameters(self) -> int:
        """Return the number of parameters.

        Example:

        >>> f"{named('gpt_175b').parameters() / 1e9:.1f} billion"
        '174.6 billion'
        """
        blocks = sum(kind.number * self.block_parameters(kind) for kind in self.kinds)
        own = self.embedding_parameters() + self.head_parameters() + self.other_parameters
        return blocks + own

    def flops_per_sequence(self) -> float:
        """Return the floating-point operations of a training step without recompute, a sequence.

        Six for each position and weight in a product, and those of the attention cores.
        """
        heads, flops = self.num_heads * self.head_dim, 0.0
        chosen = min(self.experts_chosen, self.num_experts)
        for kind in self.kinds:
            weights = len(kind.attended) * self.attention_parameters()
            weights += chosen * self.expert_parameters()
            scores = 2 * heads * sum(kind.attended)
            flops += 6.0 * kind.number * kind.length * (weights + scores)
        return flops + 6.0 * self.sequence_length * self.hidden_size * self.vocab_size


def named(name: str, **changes) -> ModelShape:
    """Return the shape of a published model.

    Args:
        name: a key of `dtransformer.architectures.ARCHITECTURES`; "-" may stand for "_".
        **changes: fields of `ModelShape` that replace its own, such as `sequence_length`.

    Raises:
        InputError: there is no such model; lists what exists.

    Example:

    >>> named("llama2-7b").num_layers, named("bert_base", sequence_length=128).sequence_length
    (32, 128)
    """
    key = str(name).lower().replace("-", "_")
    if key not in ARCHITECTURES:
        close = difflib.get_close_matches(key, ARCHITECTURES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? There are also " if close else "there are "
        raise InputError(
            f"there is no model {shown(name)}: {hint}{', '.join(ARCHITECTURES)}; or give a YAML file"
        )
    return from_architecture(key, ARCHITECTURES[key], **changes)


def from_architecture(name: str, architecture: Architecture, **changes) -> ModelShape:
    """Return the shape of a network, from the name of its class and its arguments.

    Args:
        name: what it is called.
        architecture: its `Architecture`.
        **changes: fields of `ModelShape` that replace its own.
    """
    given, network = architecture.arguments, architecture.network
    h, has_encoder = given["hidden_size"], "encoder_layers" in given
    length = given.get("max_length") or given.get("max_target_length")
    fields = {
        "name": name,
        "hidden_size": h,
        "num_heads": given["num_heads"],
        "ffn_hidden_size": given.get("ffn_hidden_size"),
        "vocab_size": given.get("vocab_size") or given.get("target_vocab_size"),
        "sequence_length": length or _DEFAULT_LENGTH,
        "num_kv_heads": given.get("num_kv_heads"),
        "head_dim": given.get("head_dim"),
        "gated": bool(given.get("gated", False)),
        "use_bias": given.get("use_bias", True),
        "rms_norm": given.get("norm") == "rms_norm",
        "tied_head": given.get("tied_head", True),
        "is_causal": network != "MaskedLM",
    }
    for key in ("num_layers", "encoder_layers", "decoder_layers"):
        fields[key] = given.get(key, 0)
    learned = "learned" if network in ("MaskedLM", "EncoderDecoderLM", "CausalLM") else None
    if given.get("positions", learned) == "learned":
        default = 1024 if network == "EncoderDecoderLM" else 512
        entries = given.get("max_length", default) + given.get("position_offset", 0)
        fields["learned_positions"] = entries * (2 if has_encoder else 1)
    if has_encoder and not given.get("shared_embeddings", True):
        fields["other_parameters"] = h * given["source_vocab_size"]
    if network == "MaskedLM":
        types, pair = given.get("num_token_types", 2), given.get("next_sentence", False)
        dense = h * h + h
        own = 2 * h + h * types + dense + 2 * h + fields["vocab_size"]
        fields["other_parameters"] = own + pair * (dense + 2 * h + 2)
    if experts := given.get("moe_config"):
        get = experts.get if isinstance(experts, Mapping) else lambda *a: getattr(experts, *a)
        if given.get("moe_every", 1) > 1:
            raise InputError(
                f"{name}: experts in every {given['moe_every']} blocks are not planned: give a "
                "ModelShape with experts in all, or in none"
            )
        fields["num_experts"] = get("expert_num", 1)
        fields["experts_chosen"] = get("num_experts_chosen", 1)
        fields["capacity_factor"] = float(get("capacity_factor", 1.1))
    if has_encoder and given.get("embedding_norm"):
        fields["other_parameters"] = 4 * h
    return checked(ModelShape, {**fields, **changes})


def from_network(network: object, **changes) -> ModelShape:
    """Return the shape of a network that was made, built or not.

    Args:
        network: a network of `dtransformer.models`.
        **changes: fields of `ModelShape` that replace its own.

    Raises:
        InputError: it does not say its arguments.
    """
    if not isinstance(getattr(network, "arguments", None), Mapping):
        raise InputError(
            f"{shown(type(network).__name__)} does not tell its sizes: give a network of "
            "dtransformer.models, or a ModelShape"
        )
    architecture = Architecture(type(network).__name__, dict(network.arguments), "")
    return from_architecture(network.name, architecture, **changes)


def checked(kind, fields: Mapping):
    """Return a dataclass of fields; those that it does not have are refused in one line.

    Raises:
        InputError: a field is unknown or missing; lists what there is.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise InputError(f"{kind.__name__} has no {shown(name)}; it has {', '.join(known)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(f"{kind.__name__}: {str(error).split('__init__() ')[-1]}") from None
