"""DeepSeek-V2 and V3: multi-head latent attention and many small experts.

Reference:
    - [DeepSeek-AI, 2024, DeepSeek-V2](https://arxiv.org/abs/2405.04434)
    - [DeepSeek-AI, 2024, DeepSeek-V3](https://arxiv.org/abs/2412.19437)
    - The published code, for details that the papers omit
"""

import dataclasses
import math
from collections.abc import Mapping

from dtransformer.block_forms import Latent
from dtransformer.errors import InputError
from dtransformer.layers.rotary import yarn_magnitude
from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import Blocks
from dtransformer.models.pretrained.families.experts import (
    Experts,
    deepseek_experts,
    first_dense,
    next_tokens,
)
from dtransformer.models.pretrained.families.family import Family, llama_parts_without


class _Latents:
    """Mapping of latent sizes and of the query factor, which grows with rotary scaling."""

    arguments = "latent", "head_dim", "query_scale", "num_kv_heads"
    _fields = {"kv_rank": "kv_lora_rank", "query_rank": "q_lora_rank", "value_dim": "v_head_dim"}
    _defaults = {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128}
    _heads = "num_attention_heads", "num_key_value_heads"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

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
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If the network has no latents, or an unsupported query factor.
        """
        latent = Latent.of(arguments["latent"])
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


@dataclasses.dataclass(frozen=True)
class _GroupLimitedExperts(Experts):
    """Mapping of DeepSeek-V2's experts. Only one routing method selects groups of experts."""

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

        Raises:
            InputError: If the routing method is unknown.
        """
        moe_config = super().from_hf(config)["moe_config"]
        method = config.get("topk_method") or _METHODS[0]
        if method not in _METHODS:
            raise InputError(f"`topk_method` must be one of {', '.join(_METHODS)}, got {method!r}.")
        if method == _METHODS[0]:
            moe_config = dataclasses.replace(moe_config, routing_groups=1, routing_groups_chosen=1)
        return {"moe_config": moe_config}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`."""
        fields = super().to_hf(arguments)
        return {**fields, "topk_method": _METHODS[fields["topk_group"] < fields["n_group"]]}


_METHODS = "greedy", "group_limited_greedy"
_REFUSED = {"attention_bias": False, "moe_layer_freq": 1}
_COMMON = {
    "default_parts": llama_parts_without("num_kv_heads", "head_dim"),
    "attention": {
        "self_attn.q_proj": ("attention/query",),
        "self_attn.q_a_proj": ("attention/query_down",),
        "self_attn.q_b_proj": ("attention/query_up",),
        "self_attn.kv_a_proj_with_mqa": ("attention/latent",),
        "self_attn.kv_b_proj": ("attention/key_value",),
        "self_attn.o_proj": ("attention/output",),
    },
    "norms": {
        **paths.PRE,
        "self_attn.q_a_layernorm": "attention/query_latent_norm",
        "self_attn.kv_a_layernorm": "attention/latent_norm",
    },
    "dense": {**paths.GATED, **paths.SHARED},
    "is_interleaved": True,
    "skipped_prefixes": next_tokens,
}
_V2 = {"normalizes_gates": False, "group_score": "max"}
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    parts=(
        _Latents(),
        Blocks(dense=first_dense(0)),
        deepseek_experts(64, 8, 1407, 2, 1.0, 1, 1, kind=_GroupLimitedExperts, **_V2),
    ),
    supported_values={
        **_REFUSED,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "mlp_bias": False,
    },
    ids={"bos_token_id": 1, "eos_token_id": 2},
    **_COMMON,
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    parts=(
        _Latents(),
        Blocks(dense=first_dense(3)),
        deepseek_experts(256, 8, 2048, 1, 2.5, 8, 4, True, router_type="sigmoid"),
    ),
    supported_values={
        **_REFUSED,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    ids={"bos_token_id": 0, "eos_token_id": 1},
    **_COMMON,
)
