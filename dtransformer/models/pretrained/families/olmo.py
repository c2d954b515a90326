"""OLMo 2 and 3, OLMoE and EXAONE 4.

OLMo 2 and 3 and EXAONE 4 normalize the outputs of sublayers.

Reference:
    - [OLMo Team, 2025, OLMo 2](https://arxiv.org/abs/2501.00656)
    - [Muennighoff et al., 2024, OLMoE](https://arxiv.org/abs/2409.02060)
    - [LG AI Research, 2025, EXAONE 4.0](https://arxiv.org/abs/2507.11407)
    - OLMo 3: its published code
"""

from collections.abc import Mapping

from dtransformer.models.pretrained.families.blocks import (
    FULL,
    SLIDING,
    Blocks,
    Rotary,
    RotaryByKind,
    Windows,
    periodic_kind,
)
from dtransformer.models.pretrained.families.experts import Experts
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.keys import Key, epsilon, kv_heads
from dtransformer.models.pretrained.families.weights import EXPERTS, llama_weights

_EPSILON = epsilon(1e-5, same=("qk_norm_epsilon",))
_OUTPUT_NORM_WEIGHTS = llama_weights(
    {
        "post_attention_layernorm": "attention_norm",
        "post_feedforward_layernorm": "feed_forward_norm",
        "self_attn.q_norm": "attention/query_norm",
        "self_attn.k_norm": "attention/key_norm",
    }
)
_OLMO = {
    "weights": _OUTPUT_NORM_WEIGHTS,
    "fixed": {"qk_norm": "rms_norm_all_heads", "norm_placement": "output"},
    "supported_values": {"attention_bias": False},
    "ids": {"pad_token_id": 1, "eos_token_id": 50279},
}
OLMO2 = Family("Olmo2ForCausalLM", keys=llama_keys(_EPSILON), **_OLMO)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    keys=llama_keys(
        _EPSILON,
        Blocks(
            RotaryByKind(full=Rotary(5e5), sliding=Rotary(5e5)),
            Windows(4096, period=4, has_layer_types=True),
        ),
    ),
    **_OLMO,
)
OLMOE = Family(
    "OlmoeForCausalLM",
    keys=llama_keys(
        _EPSILON,
        Experts(
            (
                Key("num_experts", "expert_num", 64),
                Key("num_experts_per_tok", "num_experts_chosen", 8),
                Key("norm_topk_prob", "normalizes_gates", False),
            ),
            aux_loss=0.01,
        ),
    ),
    weights=llama_weights(feed_forward=EXPERTS),
    fixed={"qk_norm": "rms_norm_all_heads"},
    supported_values={"attention_bias": False, "clip_qkv": None},
    ids={"pad_token_id": 1, "eos_token_id": 50279},
)


class _ExaoneWindows(Windows):
    """Windows in the blocks that `sliding_window_pattern` selects.

    The key is a period, or a string with one letter per block of a period. `L` means a sliding
    block. With letters the last block is always full.
    """

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        pattern = config.get("sliding_window_pattern", 4)
        if config.get("sliding_window", 4096) is None or not pattern:
            return FULL
        if not isinstance(pattern, str):
            return periodic_kind(index, pattern)
        is_last = index == config["num_hidden_layers"] - 1
        return SLIDING if pattern[index % len(pattern)] == "L" and not is_last else FULL


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    keys=llama_keys(
        _EPSILON,
        kv_heads(32),
        Blocks(windows=_ExaoneWindows(4096, has_layer_types=True, full_has_rotary=False)),
    ),
    weights=_OUTPUT_NORM_WEIGHTS,
    fixed={"qk_norm": "rms_norm", "norm_placement": "output"},
    ids={"bos_token_id": 0, "eos_token_id": 2},
)
