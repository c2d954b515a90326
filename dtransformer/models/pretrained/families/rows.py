"""Rows of a family's table of config keys for several arguments."""

import dataclasses
import math
from collections.abc import Mapping

from dtransformer.block_forms import Latent
from dtransformer.errors import InputError, short_repr
from dtransformer.layers.rotary import yarn_magnitude
from dtransformer.models.base import value_or_default
from dtransformer.models.pretrained.families.keys import (
    activation,
    hf_activation,
    unsupported_argument,
)

_ONE_NORM = "parallel_one_norm"


@dataclasses.dataclass(frozen=True)
class PositionsAfterPadding:
    """Row of learned positions that start after the padding id, as in RoBERTa.

    Args:
        length: Integer. Default number of positions.
        default: Integer. Default padding id. Without it, the key is required.
        counts_padding: Boolean. Whether the length in configs includes the positions before
            the first used one.
    """

    length: int
    default: int | None = None
    counts_padding: bool = False
    arguments: tuple[str, ...] = ("position_offset", "max_length")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If the config has no padding id.
        """
        pad_id = value_or_default(config.get("pad_token_id"), self.default)
        if pad_id is None:
            raise InputError("The field `pad_token_id` is missing. Positions start after it.")
        length = value_or_default(config.get("max_position_embeddings"), self.length)
        if self.counts_padding:
            length -= pad_id + 1
        return {"position_offset": pad_id + 1, "max_length": length}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the positions do not start after the padding id.
        """
        offset = arguments["position_offset"]
        pad_id = arguments["pad_id"]
        if pad_id is None or offset != pad_id + 1:
            expected = "pad_id + 1" if pad_id is None else pad_id + 1
            raise unsupported_argument("position_offset", offset, expected)
        length = arguments["max_length"]
        return {"max_position_embeddings": length + offset if self.counts_padding else length}


class FalconHeads:
    """Row of Falcon's key and value heads and norms."""

    arguments = "num_kv_heads", "norm_placement"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`."""
        heads = config.get("num_kv_heads")
        is_multi_query = config.get("multi_query", True)
        has_two = config.get("num_ln_in_parallel_attn") != 1
        if not config.get("new_decoder_architecture"):
            heads = 1 if is_multi_query else None
            has_two = False
        return {
            "num_kv_heads": heads or config["num_attention_heads"],
            "norm_placement": "parallel" if has_two else _ONE_NORM,
        }

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the blocks are not parallel.
        """
        placement = arguments["norm_placement"]
        norms = {_ONE_NORM: 1, "parallel": 2}.get(placement)
        if norms is None:
            raise unsupported_argument("norm_placement", repr(placement), "'parallel'")
        heads = arguments["num_kv_heads"] or arguments["num_heads"]
        is_new = norms == 2 or heads not in (1, arguments["num_heads"])
        fields = {"num_kv_heads": heads, "num_ln_in_parallel_attn": norms} if is_new else {}
        return {"new_decoder_architecture": is_new, "multi_query": heads == 1, **fields}


@dataclasses.dataclass(frozen=True)
class FeedForward:
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


class NextSentence:
    """Row of the architecture in a config and the head for next-sentence prediction."""

    arguments = ("next_sentence",)
    _class = "BertForPreTraining"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`."""
        return {"next_sentence": self._class in (config.get("architectures") or ())}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`."""
        return {"architectures": [self._class]} if arguments["next_sentence"] else {}


class Latents:
    """Row of latent sizes and of the query factor, which grows with rotary scaling."""

    arguments = "latent", "head_dim", "query_scale", "num_kv_heads"
    _fields = {"kv_rank": "kv_lora_rank", "query_rank": "q_lora_rank", "value_dim": "v_head_dim"}
    _defaults = {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128}
    _heads = "num_attention_heads", "num_key_value_heads"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If several heads share keys and values.
        """
        # Mark both keys as read: their values follow from other keys.
        for name in ("head_dim", "qk_head_dim"):
            config.get(name)
        heads, shared = (config.get(name) for name in self._heads)
        if shared not in (None, heads):
            raise InputError(
                f"`num_key_value_heads={shared}` is not supported with latents. It must equal "
                "`num_attention_heads`."
            )
        sizes = {
            size_name: config.get(field, self._defaults[field])
            for size_name, field in self._fields.items()
        }
        rotary = config.get("qk_rope_head_dim", 64)
        size = config.get("qk_nope_head_dim", 128) + rotary
        scaling = config.get("rope_parameters") or config.get("rope_scaling")
        return {
            "latent": {**sizes, "rotary_dim": rotary},
            "head_dim": size,
            "query_scale": size**-0.5 * _magnitude(scaling or {}),
            "num_kv_heads": None,
        }

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the network has no latents, or an unsupported query factor.
        """
        latent = Latent.from_sizes(arguments["latent"])
        size = arguments["head_dim"]
        if latent is None:
            raise InputError(
                "The family has latent attention, the network does not. Save it as another family."
            )
        scale = size**-0.5 * _magnitude(arguments["rotary_scaling"] or {})
        value = arguments["query_scale"] or size**-0.5
        if not math.isclose(value, scale, rel_tol=1e-6):
            raise InputError(f"`query_scale={value}` cannot be saved: the family needs {scale}.")
        fields = {field: getattr(latent, value) for value, field in self._fields.items()}
        rotary = {
            "qk_rope_head_dim": latent.rotary_dim,
            "qk_nope_head_dim": size - latent.rotary_dim,
        }
        return {**fields, **rotary, "num_key_value_heads": arguments["num_heads"]}


def _magnitude(scaling):
    """Return the factor of queries that the rotary scaling of a config implies."""
    mscale = scaling.get("mscale_all_dim")
    return yarn_magnitude(scaling["factor"], mscale) ** 2 if mscale else 1.0
