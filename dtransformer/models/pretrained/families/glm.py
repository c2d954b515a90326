"""GLM-4 with 9 and 32 billion parameters, and GLM-4.5 with experts.

Reference:
    - [Team GLM, 2024, ChatGLM](https://arxiv.org/abs/2406.12793)
    - [GLM-4.5 Team, 2025](https://arxiv.org/abs/2508.06471)
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import Blocks
from dtransformer.models.pretrained.families.experts import (
    deepseek_experts,
    first_dense,
    next_tokens,
)
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.parts import Field, epsilon, head_dim, kv_heads

_PARTS = (
    kv_heads(2),
    head_dim(128),
    epsilon(1.5625e-7),
    Blocks(fraction=0.5),
    Field("qkv_bias", "attention_bias", True),
)
_IDS = {"pad_token_id": 151329, "eos_token_id": 151329}

GLM = Family("GlmForCausalLM", parts=_PARTS, dense=paths.FUSED_GATED, ids=_IDS, is_interleaved=True)
GLM4 = Family(
    "Glm4ForCausalLM",
    parts=_PARTS,
    fixed={"norm_placement": "sandwich"},
    dense=paths.FUSED_GATED,
    ids=_IDS,
    norms={
        "input_layernorm": "attention_norm",
        "post_self_attn_layernorm": "attention_output_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "post_mlp_layernorm": "feed_forward_output_norm",
    },
    is_interleaved=True,
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    parts=(
        kv_heads(8),
        epsilon(1e-5, same=("qk_norm_epsilon",)),
        Blocks(fraction=0.5, dense=first_dense(1)),
        Field("qkv_bias", "attention_bias", False),
        Field("qk_norm", "use_qk_norm", False, lambda x: "rms_norm" if x else None, bool),
        deepseek_experts(128, 8, 1408, 1, 1.0, 1, 1, True, router_type="sigmoid"),
    ),
    dense={**paths.GATED, **paths.SHARED},
    skipped_prefixes=next_tokens,
)
