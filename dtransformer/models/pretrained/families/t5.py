"""T5, T5 1.1 and mT5.

Reference:
    - [Raffel et al., 2019, T5](https://arxiv.org/abs/1910.10683)
    - [Xue et al., 2020, mT5](https://arxiv.org/abs/2010.11934)
"""

import dataclasses
from collections.abc import Collection, Mapping

from dtransformer.errors import InputError, short_repr
from dtransformer.models.base import value_or_default
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families.bart import TABLE_COPIES
from dtransformer.models.pretrained.families.family import Family, FileNames
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    activation,
    epsilon,
    head_size,
    hf_activation,
)
from dtransformer.models.pretrained.families.weights import Table, blocks, products


@dataclasses.dataclass(frozen=True)
class _FeedForward:
    """Row of the activation and of whether the feed-forward layer is gated."""

    default: str = "relu"
    arguments: tuple[str, ...] = ("gated", "hidden_act")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If the layer is unknown.
        """
        value = value_or_default(config.get("feed_forward_proj"), self.default)
        *gate, name = value.split("-")
        if gate not in ([], ["gated"]):
            raise InputError(
                "`feed_forward_proj` must be an activation or 'gated-ACTIVATION', got "
                f"{short_repr(value)}."
            )
        if gate and name == "gelu":
            name = "gelu_new"  # The first T5 1.1 configs mean the tanh approximation.
        return {"gated": bool(gate), "hidden_act": activation(name)}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If configs have no name for the gate.
        """
        name = hf_activation(arguments["hidden_act"])
        if arguments["gated"] and name == "gelu":
            raise InputError(
                "A gated `hidden_act='gelu'` has no name in T5's configs. Use 'gelu_tanh'."
            )
        gates = {"gelu_new": "gated-gelu"}
        return {
            "feed_forward_proj": gates.get(name, f"gated-{name}") if arguments["gated"] else name
        }


def _block_weights(side: str, *tables: Table) -> Table:
    return blocks(f"{side}.block.{{i}}.layer.", *tables, path=f"transformer/{side}/block_{{i}}/")


def _feed_forward(layer: str, is_gated: bool) -> Table:
    """Return the table of a feed-forward layer with an index among the sublayers of a block."""
    name = f"{layer}.DenseReluDense"
    if is_gated:
        inputs = {f"{name}.wi_0": "feed_forward/gate", f"{name}.wi_1": "feed_forward/mapping"}
    else:
        inputs = {f"{name}.wi": "feed_forward/mapping"}
    return {**inputs, f"{name}.wo": "feed_forward/projection"}


class _T5(Family):
    """Family whose feed-forward weights have other names if they are gated."""

    def weight_names(self, arguments: Mapping) -> Table:
        """Return the table of weight names for a network's arguments."""
        is_gated = arguments["gated"]
        return {
            **self.weights,
            **_block_weights("encoder", _feed_forward("1", is_gated)),
            **_block_weights("decoder", _feed_forward("2", is_gated)),
        }

    def adapt_to_file(self, arguments: dict, names: Collection[str]) -> dict:
        """Untie the head if a T5 1.1 file has one. Newer T5 1.1 configs wrongly tie it."""
        has_head = not arguments["scales_output"] and self.head_name in names
        return {**arguments, "tied_head": arguments["tied_head"] and not has_head}


_KEYS = (
    Key("d_model", "hidden_size"),
    Key("num_heads", "num_heads"),
    Key("d_ff", "ffn_hidden_size"),
    Key("d_kv", "head_dim", unset=head_size),
    Key("num_layers", "encoder_layers"),
    Key("num_decoder_layers", "decoder_layers", lambda config: config["num_layers"]),
    Key(
        "dropout_rate",
        "dropout_rate",
        0.1,
        same=("attention_dropout_rate", "embedding_dropout_rate"),
    ),
    epsilon(1e-6, "layer_norm_epsilon"),
    Key("relative_attention_num_buckets", "relative_ranges", 32),
    Key("relative_attention_max_distance", "relative_max_distance", 128),
    TIED,
)
_POSITIONS = "relative_positions/table"
_RELATIVE_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5 = _T5(
    "T5ForConditionalGeneration",
    keys=(
        *_KEYS,
        _FeedForward(),
        Key(
            "scale_decoder_outputs",
            "scales_output",
            lambda config: config.get("tie_word_embeddings") is not False,
        ),
    ),
    weights={
        "shared.weight": "source_embedding/table",
        f"encoder.{_RELATIVE_BIAS}": f"transformer/encoder/{_POSITIONS}",
        f"decoder.{_RELATIVE_BIAS}": f"transformer/decoder/{_POSITIONS}",
        **_block_weights(
            "encoder",
            {"0.layer_norm": "attention_norm", "1.layer_norm": "feed_forward_norm"},
            products("0.SelfAttention.{}", *"qkvo"),
        ),
        "encoder.final_layer_norm": "transformer/encoder/final_norm",
        **_block_weights(
            "decoder",
            {
                "0.layer_norm": "self_attention_norm",
                "1.layer_norm": "cross_attention_norm",
                "2.layer_norm": "feed_forward_norm",
            },
            products("0.SelfAttention.{}", *"qkvo", path="self_attention"),
            products("1.EncDecAttention.{}", *"qkvo", path="cross_attention"),
        ),
        "decoder.final_layer_norm": "transformer/decoder/final_norm",
        "lm_head": "head",
    },
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
    network=EncoderDecoderLM,
    files=FileNames(
        ignored=("EncDecAttention.relative_attention_bias.weight",), table_copies=TABLE_COPIES
    ),
)
# mT5 follows T5 1.1: gated, with unscaled decoder outputs.
MT5 = dataclasses.replace(
    T5, architecture="MT5ForConditionalGeneration", keys=(*_KEYS, _FeedForward("gated-gelu"))
)
