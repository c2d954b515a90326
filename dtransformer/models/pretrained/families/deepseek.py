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
from dtransformer.models.pretrained.families.blocks import Blocks
from dtransformer.models.pretrained.families.experts import (
    NEXT_TOKEN_BLOCKS,
    Experts,
    FirstDenseBlocks,
    deepseek_experts,
)
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.weights import (
    DEEPSEEK_EXPERTS,
    NORMS,
    llama_weights,
)


class _Latents:
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


@dataclasses.dataclass(frozen=True)
class _GroupLimitedExperts(Experts):
    """Row of DeepSeek-V2's experts. Only one routing method selects groups of experts."""

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

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
        """Return the config keys from network arguments; see `Row`."""
        fields = super().to_hf(arguments)
        return {**fields, "topk_method": _METHODS[fields["topk_group"] < fields["n_group"]]}


_METHODS = "greedy", "group_limited_greedy"
_COMMON = {
    "weights": llama_weights(
        norms={
            **NORMS,
            "self_attn.q_a_layernorm": "attention/query_latent_norm",
            "self_attn.kv_a_layernorm": "attention/latent_norm",
        },
        attention={
            "self_attn.q_proj": "attention/query",
            "self_attn.q_a_proj": "attention/query_down",
            "self_attn.q_b_proj": "attention/query_up",
            "self_attn.kv_a_proj_with_mqa": "attention/latent",
            "self_attn.kv_b_proj": "attention/key_value",
            "self_attn.o_proj": "attention/output",
        },
        feed_forward=DEEPSEEK_EXPERTS,
    ),
    "is_interleaved": True,
    "files": NEXT_TOKEN_BLOCKS,
}
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    keys=llama_keys(
        _Latents(),
        Blocks(dense_blocks=FirstDenseBlocks(0)),
        deepseek_experts(
            _GroupLimitedExperts,
            n_routed_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=1407,
            n_shared_experts=2,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            fixed={"normalizes_gates": False, "group_score": "max"},
        ),
    ),
    supported_values={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "mlp_bias": False,
    },
    ids={"bos_token_id": 1, "eos_token_id": 2},
    **_COMMON,
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    keys=llama_keys(
        _Latents(),
        Blocks(dense_blocks=FirstDenseBlocks(3)),
        deepseek_experts(
            n_routed_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            fixed={"router_type": "sigmoid"},
        ),
    ),
    supported_values={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    ids={"bos_token_id": 0, "eos_token_id": 1},
    **_COMMON,
)
