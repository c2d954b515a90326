"""T5, T5 1.1 and mT5.

Reference:
    - [Raffel et al., 2019, T5](https://arxiv.org/abs/1910.10683)
    - [Xue et al., 2020, mT5](https://arxiv.org/abs/2010.11934)
"""

import dataclasses
from collections.abc import Collection, Mapping

from dtransformer.errors import InputError, shown
from dtransformer.models.base import first_given
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.bart import BASE, COPIES
from dtransformer.models.pretrained.families.family import DECODER_IDS, Family
from dtransformer.models.pretrained.families.parts import (
    TIED,
    Field,
    activation,
    epsilon,
    published_activation,
)

_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class _FeedForward:
    """Mapping of the activation and of whether the feed-forward layer is gated."""

    default: str = "relu"
    arguments: tuple[str, ...] = ("gated", "hidden_act")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

        Raises:
            InputError: If the layer is unknown.
        """
        value = first_given(config.get("feed_forward_proj"), self.default)
        *gate, name = value.split("-")
        if gate not in ([], ["gated"]):
            raise InputError(
                f"`feed_forward_proj` must be an activation or 'gated-ACTIVATION', got {shown(value)}."
            )
        if gate and name == "gelu":
            name = "gelu_new"  # The first T5 1.1 configs mean the tanh approximation.
        return {"gated": bool(gate), "hidden_act": activation(name)}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If configs have no name for the gate.
        """
        name = published_activation(arguments["hidden_act"])
        if arguments["gated"] and name == "gelu":
            raise InputError(
                "A gated `hidden_act='gelu'` has no name in T5's configs. Use 'gelu_tanh'."
            )
        gates = {"gelu_new": "gated-gelu"}
        return {
            "feed_forward_proj": gates.get(name, f"gated-{name}") if arguments["gated"] else name
        }


def _stack(side, *attentions):
    """Return the `Family` fields that differ in one side's blocks.

    Args:
        side: `"encoder"` or `"decoder"`.
        *attentions: Tuples of an attention's name in `transformers` and its path here.
    """
    last = len(attentions)
    attention = {}
    norms = {}

    def dense(arguments):
        gated = {"wi_0": "gate", "wi_1": "mapping"}
        names = {**(gated if arguments["gated"] else {"wi": "mapping"}), "wo": "projection"}
        return {f"{last}.DenseReluDense.{x}": (f"feed_forward/{y}",) for x, y in names.items()}

    for i, (hf_name, path) in enumerate(attentions):
        attention |= paths.attention(f"{i}.{hf_name}.{{}}", *"qkvo", path=path)
        norms[f"{i}.layer_norm"] = f"{path}_norm"
    return {
        "block": f"{side}.block.{{}}.layer.",
        "path": f"transformer/{side}/block_{{}}/",
        "attention": attention,
        "dense": dense,
        "norms": {**norms, f"{last}.layer_norm": "feed_forward_norm"},
    }


def _finalize(arguments: dict, tensor_names: Collection[str]) -> dict:
    """Untie the head if a T5 1.1 file has one. Newer T5 1.1 configs wrongly tie it."""
    has_head = not arguments["scales_output"] and _HEAD in tensor_names
    return {**arguments, "tied_head": arguments["tied_head"] and not has_head}


_PARTS = (
    Field("hidden_size", "d_model"),
    Field("num_heads", "num_heads"),
    Field("ffn_hidden_size", "d_ff"),
    Field(
        "head_dim",
        "d_kv",
        none_value=lambda arguments: arguments["hidden_size"] // arguments["num_heads"],
    ),
    Field("encoder_layers", "num_layers"),
    Field("decoder_layers", "num_decoder_layers", lambda config: config["num_layers"]),
    Field(
        "dropout_rate",
        "dropout_rate",
        0.1,
        same=("attention_dropout_rate", "embedding_dropout_rate"),
    ),
    epsilon(1e-6, "layer_norm_epsilon"),
    Field("relative_ranges", "relative_attention_num_buckets", 32),
    Field("relative_max_distance", "relative_attention_max_distance", 128),
    TIED,
)
_BIAS = "{0}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5 = Family(
    "T5ForConditionalGeneration",
    parts=(
        *_PARTS,
        _FeedForward(),
        Field(
            "scales_output",
            "scale_decoder_outputs",
            lambda config: config.get("tie_word_embeddings") is not False,
        ),
    ),
    fixed={
        "positions": "relative",
        "norm": "rms_norm",
        "use_bias": False,
        "post_layernorm_residual": False,
        "query_scale": 1.0,
        "embedding_scale": 1.0,
        "head_bias": False,
    },
    supported_values={"is_decoder": False, "is_encoder_decoder": True},
    stacks={
        "encoder_layers": _stack("encoder", ("SelfAttention", "attention")),
        "decoder_layers": _stack(
            "decoder", ("SelfAttention", "self_attention"), ("EncDecAttention", "cross_attention")
        ),
    },
    tables={
        "shared.weight": "source_embedding/table",
        _BIAS.format("encoder"): "transformer/encoder/relative_positions/table",
        _BIAS.format("decoder"): "transformer/decoder/relative_positions/table",
    },
    top={
        "encoder.final_layer_norm": "transformer/encoder/final_norm",
        "decoder.final_layer_norm": "transformer/decoder/final_norm",
        "lm_head": "head",
    },
    base=BASE,
    default_parts=(),
    network=EncoderDecoderLM,
    special_ids=DECODER_IDS,
    needs_unique_padding=False,
    copies=COPIES,
    ignored=("EncDecAttention.relative_attention_bias.weight",),
    finalize=_finalize,
)
# mT5 follows T5 1.1: gated, with unscaled decoder outputs.
MT5 = dataclasses.replace(
    T5, architecture="MT5ForConditionalGeneration", parts=(*_PARTS, _FeedForward("gated-gelu"))
)
