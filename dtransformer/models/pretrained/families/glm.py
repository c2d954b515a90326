"""GLM-4 with 9 and 32 billion parameters, and GLM-4.5 with experts.

Reference:
    - [Team GLM, 2024, ChatGLM](https://arxiv.org/abs/2406.12793)
    - [GLM-4.5 Team, 2025](https://arxiv.org/abs/2508.06471)
"""

from dtransformer.models.pretrained.families import weights
from dtransformer.models.pretrained.families.blocks import Blocks, Rotary
from dtransformer.models.pretrained.families.experts import (
    NEXT_TOKEN_BLOCKS,
    FirstDenseBlocks,
    deepseek_experts,
)
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.keys import Key, choice, epsilon, head_dim, kv_heads

_KEYS = llama_keys(
    kv_heads(2),
    head_dim(128),
    epsilon(1.5625e-7),
    Blocks(Rotary(fraction=0.5)),
    Key("attention_bias", "qkv_bias", True),
)
_IDS = {"pad_token_id": 151329, "eos_token_id": 151329}

GLM = Family(
    "GlmForCausalLM",
    keys=_KEYS,
    weights=weights.llama_weights(feed_forward=weights.FUSED_GATED),
    ids=_IDS,
    is_interleaved=True,
)
GLM4 = Family(
    "Glm4ForCausalLM",
    keys=_KEYS,
    weights=weights.llama_weights(
        {
            "input_layernorm": "attention_norm",
            "post_self_attn_layernorm": "attention_output_norm",
            "post_attention_layernorm": "feed_forward_norm",
            "post_mlp_layernorm": "feed_forward_output_norm",
        },
        feed_forward=weights.FUSED_GATED,
    ),
    fixed={"norm_placement": "sandwich"},
    ids=_IDS,
    is_interleaved=True,
)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    keys=llama_keys(
        kv_heads(8),
        epsilon(1e-5, same=("qk_norm_epsilon",)),
        Blocks(Rotary(fraction=0.5), dense_blocks=FirstDenseBlocks(1)),
        Key("attention_bias", "qkv_bias", False),
        choice("use_qk_norm", "qk_norm", False, {True: "rms_norm", False: None}),
        deepseek_experts(
            n_routed_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            n_shared_experts=1,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            fixed={"router_type": "sigmoid"},
        ),
    ),
    weights=weights.llama_weights(feed_forward=weights.DEEPSEEK_EXPERTS),
    files=NEXT_TOKEN_BLOCKS,
)
