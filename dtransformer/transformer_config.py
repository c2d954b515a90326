"""`TransformerConfig`: sizes and options of a Transformer network. It does not need TensorFlow."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Literal

from dtransformer.block_forms import check_pattern
from dtransformer.errors import check_argument, hint_members, hint_types, short_repr, suggest
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.config.validators import Count, CountOrZero, Fraction, Positive

DECODER = "CausalLM"
ENCODER = "MaskedLM"
PAIR = "EncoderDecoderLM"
TRANSLATION = "TranslationTransformer"
NETWORKS = DECODER, ENCODER, PAIR, TRANSLATION

# Default of fields whose default depends on the class of the network.
BY_NETWORK: Any = "default of the network"
_DEFAULTS = {
    "hidden_act": "gelu",
    "norm_epsilon": None,
    "post_layernorm_residual": False,
    "positions": "learned",
    "max_length": 1024,
    "embedding_scale": None,
    "tied_head": True,
}
_NETWORK_DEFAULTS = {
    DECODER: _DEFAULTS,
    ENCODER: {
        **_DEFAULTS,
        "norm_epsilon": 1e-12,
        "post_layernorm_residual": True,
        "max_length": 512,
        "embedding_scale": 1.0,
    },
    PAIR: {**_DEFAULTS, "post_layernorm_residual": True, "embedding_scale": 1.0},
    TRANSLATION: {
        **_DEFAULTS,
        "hidden_act": "relu",
        "positions": "sinusoidal",
        "max_length": 256,
        "tied_head": False,
    },
}
# Names of network arguments that differ from the names of the fields.
_ARGUMENT_NAMES = {
    TRANSLATION: {"vocab_size": "target_vocab_size", "max_length": "max_target_length"}
}
_STACKS_OF_PAIR = "encoder_layers", "decoder_layers"
POSITIONS = {
    DECODER: ("learned", "sinusoidal", "rotary", "alibi"),
    ENCODER: ("learned", "rotary"),
    PAIR: ("learned", "sinusoidal", "sinusoidal_paper", "relative"),
    TRANSLATION: ("sinusoidal", "sinusoidal_paper", "learned"),
}


def _only(default, *networks):
    """Return a field that only some networks have."""
    return dataclasses.field(default=default, metadata={"networks": networks})


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention of all blocks; see `MultiHeadAttention` and `LatentAttention`.

    Args:
        num_kv_heads: Integer. Number of key and value heads. Must divide `num_heads`. Defaults to
            `num_heads`.
        head_dim: Integer. Features per head. Defaults to `hidden_size / num_heads`.
        qkv_bias: Boolean. Whether queries, keys and values have biases. Defaults to `use_bias`.
        query_scale: Float. Factor on attention scores. Defaults to `head_dim`^(-1/2).
        soft_cap: Float c. Bounds attention scores as c·tanh(score / c). `None` disables it.
        qk_norm: Norm of queries and keys, such as `"rms_norm"`. `None` disables it.
        qk_norm_epsilon: Float. Epsilon of `qk_norm`. Defaults to the norm's default.
        qk_norm_after_rotary: Boolean. Whether `qk_norm` follows the rotary positions.
        sinks: Boolean. Whether each head has a trained attention sink.
        window: Integer. Number of positions that each position attends to, including itself. They
            precede it in a decoder, and are on either side in an encoder. `None` disables the
            limit.
        latent: Dict of the fields of `block_forms.Latent` for multi-head latent attention.
            `head_dim` is then the size of queries and keys. `None` disables latents.
        implementation: Attention implementation: `"auto"`, `"reference"`, `"blockwise"` or
            `"cudnn"`.
        rotary_base: Float. Base of rotary frequencies; see `rotary_frequencies`.
        rotary_fraction: Float. Fraction of the features of a head that rotate.
        rotary_scaling: Dict that rescales rotary frequencies; see `rotary_frequencies`. `None`
            disables it.
    """

    num_kv_heads: Count | None = _only(None, DECODER)
    head_dim: Count | None = _only(None, DECODER, PAIR)
    qkv_bias: bool | None = _only(None, DECODER)
    query_scale: Positive | None = _only(None, DECODER, PAIR)
    soft_cap: Positive | None = _only(None, DECODER)
    qk_norm: str | None = _only(None, DECODER)
    qk_norm_epsilon: Positive | None = _only(None, DECODER)
    qk_norm_after_rotary: bool = _only(False, DECODER)
    sinks: bool = _only(False, DECODER)
    window: Count | None = _only(None, DECODER, ENCODER)
    latent: dict | None = _only(None, DECODER)
    implementation: str = _only("auto", DECODER)
    rotary_base: Positive = _only(10000.0, DECODER, ENCODER)
    rotary_fraction: Positive = _only(1.0, DECODER, ENCODER)
    rotary_scaling: dict | None = _only(None, DECODER, ENCODER)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Feed-forward layers, norms and experts of all blocks; see `TransformerEncoderLayer`.

    Args:
        hidden_act: Activation of feed-forward layers. The name of a Keras activation, or a
            callable. The head of a `MaskedLM` uses it as well. Defaults to `"gelu"`, or to
            `"relu"` for translation.
        gated: Boolean. Whether feed-forward layers are gated.
        use_bias: Boolean. Whether matrix products have biases.
        norm: Norm of blocks and embeddings, such as `"layer_norm"` or `"rms_norm"`.
        norm_epsilon: Float. Constant that norms add to the variance. Defaults to 1e-12 in a
            `MaskedLM`, as in BERT, and to the norm's default in other networks.
        norm_placement: Placement of norms, a name in `block_forms.PLACEMENTS`. Defaults to
            `post_layernorm_residual`.
        post_layernorm_residual: Boolean. Whether blocks normalize after residual sums. Defaults to
            `True` in `MaskedLM` and `EncoderDecoderLM`.
        residual_scale: Float. Factor on the output of each sublayer.
        block_pattern: List of dicts with the arguments that differ between blocks, such as
            windows, rotary positions and experts; see `block_forms`. `None` if all blocks are
            equal.
        moe_config: Mixture of experts, a `MoEConfig` or a mapping of its fields. Experts replace
            feed-forward layers. `None` disables experts.
        moe_every: Integer n. Use experts in every n-th block. A `lambda_func` may choose other
            blocks.
    """

    hidden_act: str | Callable = BY_NETWORK
    gated: bool = _only(False, DECODER, ENCODER, PAIR)
    use_bias: bool = _only(True, DECODER, ENCODER, PAIR)
    norm: str = _only("layer_norm", DECODER, ENCODER, PAIR)
    norm_epsilon: Positive | None = _only(BY_NETWORK, DECODER, ENCODER, PAIR)
    norm_placement: str | None = _only(None, DECODER)
    post_layernorm_residual: bool = BY_NETWORK
    residual_scale: float = _only(1.0, DECODER)
    block_pattern: list[dict] | None = _only(None, DECODER, ENCODER)
    moe_config: MoEConfig | dict | None = None
    moe_every: Count = 1


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Embeddings of tokens, positions and token types.

    Args:
        source_vocab_size: Integer. Size of the source vocabulary of a `TranslationTransformer`.
            Defaults to `vocab_size`.
        shared_embeddings: Boolean. Whether source and target share one embedding table. Requires
            equal vocabulary sizes.
        embedding_scale: Float. Factor on embeddings. `None` means √h. Defaults to `None` in
            `CausalLM` and `TranslationTransformer`, and to 1 in other networks.
        embedding_norm: Boolean. Whether to normalize embeddings.
        trains_padding: Boolean. Whether to train the padding embedding, which may also be the
            start embedding. Marian does not train it.
        num_token_types: Integer. Number of token types, such as 2 for sentence pairs. 0 disables
            token types.
        positions: `"learned"`, `"sinusoidal"`, `"sinusoidal_paper"`, `"rotary"`, `"alibi"` or
            `"relative"`. Learned positions are limited to `max_length`. Rotary positions and ALiBi
            act inside each block. Relative positions are a bias of the attention scores by
            distance in each stack (see `relative_bias`). Defaults to `"learned"`, or to
            `"sinusoidal"` for translation.
        max_length: Integer. Number of learned positions, in tokens. With an encoder, positions of
            the target. Defaults to 1024, or to 512 in a `MaskedLM` and 256 for translation.
        max_source_length: Integer. Number of learned source positions of a
            `TranslationTransformer`.
        position_offset: Integer. Index of the first position; see `PositionEmbedding`. If positive
            and the inputs have an `"attention_mask"`, positions start at the first token in the
            mask.
        positions_after_padding: Boolean. Whether positions start at the first token, which
            padding may precede.
        relative_ranges: Integer. Number of buckets of relative positions; see `relative_bias`.
        relative_max_distance: Integer. Distance of the last bucket.
    """

    source_vocab_size: Count | None = _only(None, TRANSLATION)
    shared_embeddings: bool = _only(False, TRANSLATION)
    embedding_scale: Positive | None = _only(BY_NETWORK, DECODER, ENCODER, PAIR)
    embedding_norm: bool = _only(False, PAIR)
    trains_padding: bool = _only(True, PAIR)
    num_token_types: CountOrZero = _only(2, ENCODER)
    positions: str = BY_NETWORK
    max_length: Count = BY_NETWORK
    max_source_length: Count = _only(256, TRANSLATION)
    position_offset: CountOrZero = _only(0, DECODER, ENCODER, PAIR)
    positions_after_padding: bool = _only(False, PAIR)
    relative_ranges: Count = _only(32, PAIR)
    relative_max_distance: Count = _only(128, PAIR)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Vocabulary head, and the head for next-sentence prediction; see `VocabHead`.

    Args:
        tied_head: Boolean. Whether the embedding table is also the head's kernel. Defaults to
            `False` for translation, and to `True` in other networks.
        head_bias: Boolean. Whether the head has a bias.
        trains_head_bias: Boolean. Whether to train the head's bias. In published models it is
            fixed.
        logits_scale: Float. Factor on logits.
        logits_soft_cap: Float c. Bounds logits as c·tanh(logit / c). `None` disables it.
        scales_output: Boolean. Whether to multiply decoder outputs by h^(-1/2) before the head.
        next_sentence: Boolean. Whether a `MaskedLM` has a head for next-sentence prediction on
            the first token.
    """

    tied_head: bool = BY_NETWORK
    head_bias: bool = _only(False, DECODER, PAIR, TRANSLATION)
    trains_head_bias: bool = _only(True, PAIR)
    logits_scale: float = _only(1.0, DECODER)
    logits_soft_cap: Positive | None = _only(None, DECODER)
    scales_output: bool = _only(False, PAIR)
    next_sentence: bool = _only(False, ENCODER)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a Transformer network.

    `from_arguments` creates a config from flat keyword arguments. Fields that a network does not
    have must keep their defaults. The config is complete: `None` is replaced by the value that it
    stands for in sizes and dropout rates.

    Args:
        network: Class of the network: `"CausalLM"`, `"MaskedLM"`, `"EncoderDecoderLM"` or
            `"TranslationTransformer"`.
        vocab_size: Integer. Size V of the vocabulary. For translation, of the target.
        hidden_size: Integer. Features h per token.
        num_heads: Integer. Number of attention heads. Must divide `hidden_size`, unless `head_dim`
            is set.
        ffn_hidden_size: Integer. Inner size of feed-forward layers. Defaults to 4·h.
        num_layers: Integer. Number of blocks of a single stack.
        encoder_layers: Integer. Number of blocks of an encoder-decoder's encoder.
        decoder_layers: Integer. Number of blocks of an encoder-decoder's decoder.
        dropout_rate: Float in [0, 1). Dropout of embeddings and sublayer outputs.
        attention_dropout_rate: Float in [0, 1). Dropout of attention probabilities. Defaults to
            `dropout_rate`.
        embedding_dropout_rate: Float in [0, 1). Dropout of embeddings. Defaults to `dropout_rate`.
        pad_id: Integer. Id of the padding token. `None` if a vocabulary without targets has no
            such token.
        start_id: Integer. Id of the start token. `None` if the vocabulary has no such token.
        end_id: Integer. Id of the end token. `None` if the vocabulary has no such token.
        prefix: Boolean. Whether each text starts with a prefix that all of its tokens attend to in
            both directions (Raffel et al., 2020, arXiv 1910.10683, §3.2.1). In training, the input
            `"prefix"` marks it. In `generate`, it is the prompt.
        attention: `AttentionConfig`.
        block: `BlockConfig`.
        embedding: `EmbeddingConfig`.
        head: `HeadConfig`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field is out of range, the network does not have it, or fields contradict
            each other.

    Example:

    >>> attention = AttentionConfig(num_kv_heads=2)
    >>> config = TransformerConfig(vocab_size=100, hidden_size=16, num_heads=4, attention=attention)
    >>> flat = TransformerConfig.from_arguments(
    ...     "CausalLM", vocab_size=100, hidden_size=16, num_heads=4, num_kv_heads=2)
    >>> config == flat, config.ffn_hidden_size
    (True, 64)
    """

    network: Literal[NETWORKS] = DECODER
    vocab_size: Count = None
    hidden_size: Count = 512
    num_heads: Count = 8
    ffn_hidden_size: Count | None = None
    num_layers: Count = _only(6, DECODER, ENCODER)
    encoder_layers: CountOrZero = _only(6, PAIR, TRANSLATION)
    decoder_layers: Count = _only(6, PAIR, TRANSLATION)
    dropout_rate: Fraction = 0.1
    attention_dropout_rate: Fraction | None = None
    embedding_dropout_rate: Fraction | None = None
    pad_id: int | None = 0
    start_id: int | None = _only(2, DECODER, PAIR, TRANSLATION)
    end_id: int | None = _only(3, DECODER, PAIR, TRANSLATION)
    prefix: bool = _only(False, DECODER)
    attention: AttentionConfig = AttentionConfig()
    block: BlockConfig = BlockConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    head: HeadConfig = HeadConfig()

    def __post_init__(self):
        if self.network not in NETWORKS:
            raise ValueError(
                f"`network` must be one of {', '.join(NETWORKS)}, got {short_repr(self.network)}."
            )
        self._complete()
        for name, field in FIELDS.items():
            value = self.value(name)
            if self.network in field.networks:
                _check_value(field.argument(self.network), value, field.hint)
            elif value != field.default(self.network):
                raise ValueError(
                    f"`{name}={short_repr(value)}` does not apply to a {self.network}, only to "
                    f"{' and '.join(field.networks)}. Remove it."
                )
        self._check_combinations()

    def _complete(self):
        """Replace `BY_NETWORK` and `None` by the values that they stand for."""
        for group in GROUPS:
            options = getattr(self, group)
            defaults = {
                name: _NETWORK_DEFAULTS[self.network][name]
                for name, value in vars(options).items()
                if value is BY_NETWORK
            }
            object.__setattr__(self, group, dataclasses.replace(options, **defaults))
        if isinstance(self.block.moe_config, dict):
            experts = MoEConfig(**self.block.moe_config)
            object.__setattr__(self.block, "moe_config", experts)
        if self.vocab_size is None:
            object.__setattr__(self, "vocab_size", self.embedding.source_vocab_size)
        if self.network == TRANSLATION and self.embedding.source_vocab_size is None:
            object.__setattr__(self.embedding, "source_vocab_size", self.vocab_size)
        for name in ("attention_dropout_rate", "embedding_dropout_rate"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.dropout_rate)
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)

    def _check_combinations(self):
        kinds = POSITIONS[self.network]
        if self.embedding.positions not in kinds:
            raise ValueError(
                f"`positions` must be one of {', '.join(kinds)}, got {self.embedding.positions!r}."
            )
        experts = self.block.moe_config
        if experts is not None and 1 < experts.expert_num < experts.num_experts_chosen:
            raise ValueError(
                f"`num_experts_chosen={experts.num_experts_chosen}` must not exceed `expert_num="
                f"{experts.expert_num}`."
            )
        pattern = check_pattern(self.block.block_pattern)
        windows = [self.attention.window, *(block.get("window") for block in pattern)]
        if self.prefix and any(windows):
            raise ValueError(
                f"`prefix=True` does not work with `window={max(filter(None, windows))}`: the window "
                "would hide the prefix from later tokens. Remove one of them."
            )
        source_size = self.embedding.source_vocab_size or self.vocab_size
        if self.embedding.shared_embeddings and source_size != self.vocab_size:
            raise ValueError(
                "`shared_embeddings=True` needs equal vocabularies, got `source_vocab_size="
                f"{source_size}` and `target_vocab_size={self.vocab_size}`."
            )
        self._check_ids(source_size)
        if self.attention.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"`num_heads={self.num_heads}` does not divide `hidden_size={self.hidden_size}`. "
                "Change one of them or set `head_dim`."
            )

    def _check_ids(self, source_size):
        ids = {"pad_id": self.pad_id}
        if self.network != ENCODER:
            ids |= {"start_id": self.start_id, "end_id": self.end_id}
        if self.network in (PAIR, TRANSLATION) and None in ids.values():
            name = next(name for name, value in ids.items() if value is None)
            raise TypeError(f"A {self.network} needs `{name}`, got None. Set it to an integer.")
        check_ids(min(source_size, self.vocab_size), pad_id=ids.pop("pad_id"))
        check_ids(self.vocab_size, **ids)

    @property
    def stacks(self) -> dict[str, int]:
        """Dict from the field of each stack of blocks to the number of blocks."""
        names = ("num_layers",) if self.network in (DECODER, ENCODER) else _STACKS_OF_PAIR
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @classmethod
    def from_arguments(cls, network: str = DECODER, **arguments) -> "TransformerConfig":
        """Return the config for flat keyword arguments, as the network's constructor has them.

        Args:
            network: Class of the network.
            **arguments: Fields of `TransformerConfig` and of its groups, such as `rotary_base`.

        Raises:
            TypeError: If an argument is unknown. The message suggests a similar name.
        """
        if network not in NETWORKS:
            return cls(network)
        fields = {field.argument(network): field for field in FIELDS.values()}
        groups = {name: {} for name in ("", *GROUPS)}
        for name, value in arguments.items():
            if name not in fields:
                hint = suggest(name, get_arguments(network))
                raise TypeError(
                    f"{network} has no argument `{name}`, got {short_repr(value)}; {hint}"
                )
            groups[fields[name].group][fields[name].name] = value
        options = {name: kind(**groups[name]) for name, kind in GROUPS.items()}
        return cls(network, **groups[""], **options)

    def value(self, name: str) -> Any:
        """Return the value of a field of the config or of one of its groups."""
        group = FIELDS[name].group
        return getattr(getattr(self, group) if group else self, name)

    def arguments(self) -> dict[str, Any]:
        """Return the flat keyword arguments of the network. `from_arguments` is the inverse."""
        return {
            field.argument(self.network): self.value(name)
            for name, field in FIELDS.items()
            if self.network in field.networks
        }


GROUPS = {
    "attention": AttentionConfig,
    "block": BlockConfig,
    "embedding": EmbeddingConfig,
    "head": HeadConfig,
}


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """Field of `TransformerConfig` or of one of its groups.

    Args:
        group: Name of the group, or `""` for `TransformerConfig` itself.
        name: Name of the field.
        hint: Type hint.
        networks: Tuple of the networks that have the field.
        raw_default: Default, which may be `BY_NETWORK`.
    """

    group: str
    name: str
    hint: Any
    networks: tuple[str, ...]
    raw_default: Any

    def default(self, network: str) -> Any:
        """Return the default in a network."""
        is_fixed = self.raw_default is not BY_NETWORK
        return self.raw_default if is_fixed else _NETWORK_DEFAULTS[network][self.name]

    def argument(self, network: str) -> str:
        """Return the name of the network's argument."""
        return _ARGUMENT_NAMES.get(network, {}).get(self.name, self.name)


def _fields():
    fields = {}
    for group, kind in {"": TransformerConfig, **GROUPS}.items():
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            networks = field.metadata.get("networks", NETWORKS)
            fields[field.name] = ConfigField(
                group, field.name, hints[field.name], networks, field.default
            )
    return {name: field for name, field in fields.items() if name not in ("network", *GROUPS)}


# All fields of `TransformerConfig` and its groups by name.
FIELDS = _fields()


def get_arguments(network: str) -> dict[str, Any]:
    """Return the flat keyword arguments of a network with their defaults.

    Args:
        network: Class of the network, in `NETWORKS`.
    """
    return {
        field.argument(network): field.default(network)
        for field in FIELDS.values()
        if network in field.networks
    }


def check_ids(vocab_size: int, **ids: int | None) -> None:
    """Check that special tokens are in the vocabulary. Ids of `None` pass.

    Raises:
        ValueError: If an id is negative, or `vocab_size` or larger.
    """
    for name, value in ids.items():
        if value is not None and not 0 <= value < vocab_size:
            raise ValueError(
                f"`{name}` must be in the vocabulary of {vocab_size} entries, got {value}."
            )


_RANGES = {
    Count: (lambda x: x >= 1, "at least 1"),
    CountOrZero: (lambda x: x >= 0, "at least 0"),
    Positive: (lambda x: x > 0, "above 0"),
    Fraction: (lambda x: 0 <= x < 1, "a number in [0, 1)"),
}


def _check_value(name, value, hint):
    """Check the type of a value and the range of a number."""
    if kinds := hint_types(hint):
        check_argument(name, value, kinds)
    for member in _RANGES.keys() & {*hint_members(hint)}:
        is_inside, text = _RANGES[member]
        if value is not None and not is_inside(value):
            raise ValueError(f"`{name}` must be {text}, got {value!r}.")
