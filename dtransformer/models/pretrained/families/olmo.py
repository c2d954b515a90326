"""OLMo 2 and 3, OLMoE and EXAONE 4.

OLMo 2 and 3 and EXAONE 4 normalize the outputs of sublayers.

Reference:
    - [OLMo Team, 2025, OLMo 2](https://arxiv.org/abs/2501.00656)
    - [Muennighoff et al., 2024, OLMoE](https://arxiv.org/abs/2409.02060)
    - [LG AI Research, 2025, EXAONE 4.0](https://arxiv.org/abs/2507.11407)
    - OLMo 3: its published code
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import FULL, SLIDING, Blocks, every
from dtransformer.models.pretrained.families.experts import Experts
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.parts import epsilon, kv_heads

_FIXED = {"qk_norm": "rms_norm_all_heads"}
_EPSILON = epsilon(1e-5, same=("qk_norm_epsilon",))
_IDS = {"pad_token_id": 1, "eos_token_id": 50279}
_NORMS = {
    **paths.PRE,
    "post_attention_layernorm": "attention_norm",
    "post_feedforward_layernorm": "feed_forward_norm",
}
_NORMS.pop("input_layernorm")

OLMO2 = Family(
    "Olmo2ForCausalLM",
    parts=(_EPSILON,),
    fixed={**_FIXED, "norm_placement": "output"},
    supported_values={"attention_bias": False},
    ids=_IDS,
    norms=_NORMS,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    parts=(
        _EPSILON,
        Blocks(
            base=5e5,
            kind_rule=every(4),
            window=4096,
            has_types=True,
            per_kind=True,
            base_keys=dict.fromkeys((FULL, SLIDING), "rope_theta"),
        ),
    ),
    fixed={**_FIXED, "norm_placement": "output"},
    supported_values={"attention_bias": False},
    ids=_IDS,
    norms=_NORMS,
)
OLMOE = Family(
    "OlmoeForCausalLM",
    parts=(
        _EPSILON,
        Experts(
            {
                "expert_num": ("num_experts", 64),
                "num_experts_chosen": ("num_experts_per_tok", 8),
                "normalizes_gates": ("norm_topk_prob", False),
            },
            aux_loss=0.01,
        ),
    ),
    fixed=_FIXED,
    supported_values={"attention_bias": False, "clip_qkv": None},
    ids=_IDS,
)


def _slides(config, index):
    """Return the kind of a block of EXAONE 4.

    `sliding_window_pattern` is a period, or one letter per block of a period: `L` slides. The
    last block is full then.
    """
    period = config.get("sliding_window_pattern", 4)
    if config.get("sliding_window", 4096) is None or not period:
        return FULL
    if isinstance(period, str):
        is_last = index == config["num_hidden_layers"] - 1
        return SLIDING if period[index % len(period)] == "L" and not is_last else FULL
    return every(period)(config, index)


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    parts=(
        _EPSILON,
        kv_heads(32),
        Blocks(kind_rule=_slides, window=4096, has_types=True, full_has_rotary=False),
    ),
    fixed={"qk_norm": "rms_norm", "norm_placement": "output"},
    ids={"bos_token_id": 0, "eos_token_id": 2},
    norms=_NORMS,
)
