"""gpt-oss: attention sinks, and experts with biases and a clamped gate.

Expert weights in MXFP4 can be loaded (see `quantized.py`) and are saved as floats.

Reference:
    - [OpenAI, 2025, gpt-oss model card](https://arxiv.org/abs/2508.10925)
    - The published code, for details that the model card omits
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import Blocks, every
from dtransformer.models.pretrained.families.experts import Experts
from dtransformer.models.pretrained.families.family import Family, llama_parts_without
from dtransformer.models.pretrained.families.parts import epsilon, head_dim, kv_heads

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Family(
    "GptOssForCausalLM",
    parts=(
        epsilon(1e-5),
        kv_heads(8),
        head_dim(64),
        # Blocks with an even index slide.
        Blocks(base=150000.0, kind_rule=every(2), window=128, has_types=True, scaling=_YARN),
        Experts(
            {
                "expert_num": ("num_local_experts", 128),
                "num_experts_chosen": ("num_experts_per_tok", 4),
            },
            fixed={"router_bias": True},
        ),
    ),
    default_parts=llama_parts_without("hidden_act"),
    fixed={"use_bias": True, "qkv_bias": True, "sinks": True, "hidden_act": "clamped_swiglu"},
    supported_values={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    router="mlp.router",
    router_bias="mlp.router.bias",
    experts={},
    stacked={
        "mlp.experts.gate_up_proj": paths.GATE_MAPPING,
        "mlp.experts.down_proj": paths.PROJECTION,
    },
    block_vectors={"self_attn.sinks": "attention/sinks"},
)
