"""gpt-oss: attention sinks, and experts with biases and a clamped gate.

Expert weights in MXFP4 can be loaded (see `quantized.py`) and are saved as floats.

Reference:
    - [OpenAI, 2025, gpt-oss model card](https://arxiv.org/abs/2508.10925)
    - The published code, for details that the model card omits
"""

from dtransformer.models.pretrained.families.blocks import Blocks, Rotary, Windows
from dtransformer.models.pretrained.families.experts import Experts
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.keys import Key, epsilon, head_dim, kv_heads
from dtransformer.models.pretrained.families.weights import (
    ATTENTION,
    GATE_MAPPING,
    Weights,
    llama_weights,
)

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
    keys=llama_keys(
        epsilon(1e-5),
        kv_heads(8),
        head_dim(64),
        # Blocks with an even index slide.
        Blocks(Rotary(150000.0, scaling=_YARN), Windows(128, period=2, has_layer_types=True)),
        Experts(
            (
                Key("num_local_experts", "expert_num", 128),
                Key("num_experts_per_tok", "num_experts_chosen", 4),
            ),
            fixed={"router_bias": True},
        ),
        without=("hidden_act",),
    ),
    weights=llama_weights(
        attention={**ATTENTION, "self_attn.sinks": "attention/sinks"},
        feed_forward={
            "mlp.router": "feed_forward/router",
            "mlp.router.bias": "feed_forward/router/logits_bias",
            "mlp.experts.gate_up_proj": Weights(GATE_MAPPING, "stacked_experts"),
            "mlp.experts.down_proj": Weights(("feed_forward/projection",), "stacked_experts"),
        },
    ),
    fixed={"use_bias": True, "qkv_bias": True, "sinks": True, "hidden_act": "clamped_swiglu"},
    supported_values={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
