"""Apertus: Llama's blocks with xIELU, whose two weights per block are trained.

Reference:
    - [Apertus team, 2025](https://arxiv.org/abs/2509.14233)
    - [Huang, 2024, xIELU](https://arxiv.org/abs/2411.13010)
"""

from dtransformer.layers.activations import XIELU_LIMIT, XIELU_SLOPE
from dtransformer.models.pretrained.families.blocks import Blocks, Rotary
from dtransformer.models.pretrained.families.family import Family, FileNames, llama_keys
from dtransformer.models.pretrained.families.keys import epsilon
from dtransformer.models.pretrained.families.weights import llama_weights

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
APERTUS = Family(
    "ApertusForCausalLM",
    keys=llama_keys(
        epsilon(1e-5, same=("qk_norm_epsilon",)),
        Blocks(Rotary(12e6, scaling=_LLAMA3)),
        without=("hidden_act",),
    ),
    weights=llama_weights(
        norms={
            "attention_layernorm": "attention_norm",
            "feedforward_layernorm": "feed_forward_norm",
            "self_attn.q_norm": "attention/query_norm",
            "self_attn.k_norm": "attention/key_norm",
        },
        feed_forward={
            "mlp.up_proj": "feed_forward/mapping",
            "mlp.down_proj": "feed_forward/projection",
            "mlp.act_fn.alpha_p": "feed_forward/xielu_alpha_p",
            "mlp.act_fn.alpha_n": "feed_forward/xielu_alpha_n",
        },
    ),
    fixed={"qk_norm": "rms_norm", "gated": False, "hidden_act": "xielu"},
    supported_values={"attention_bias": False, "hidden_act": "xielu"},
    ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    files=FileNames(
        constants={
            "model.layers.{i}.mlp.act_fn.beta": XIELU_SLOPE,
            "model.layers.{i}.mlp.act_fn.eps": XIELU_LIMIT,
        }
    ),
)
