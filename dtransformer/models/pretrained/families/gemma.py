"""Gemma 1 to 3.

Reference:
    - [Gemma Team, 2024, Gemma](https://arxiv.org/abs/2403.08295)
    - [Gemma Team, 2024, Gemma 2](https://arxiv.org/abs/2408.00118)
    - [Gemma Team, 2025, Gemma 3](https://arxiv.org/abs/2503.19786)
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import FULL, SLIDING, Blocks, every
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.parts import (
    TIED,
    Field,
    epsilon,
    head_dim,
    hidden_act,
    kv_heads,
    query_scale,
)

_FIXED = {"norm": "rms_norm_unit_offset", "embedding_scale": None}
_REFUSED = {"attention_bias": False, "use_bidirectional_attention": False}
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_HEADS = head_dim(256), TIED
_NORMS = {
    **paths.PRE,
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
_CAPS = (
    query_scale("query_pre_attn_scalar", 256, is_square=True),
    hidden_act("hidden_activation", "gelu_pytorch_tanh"),
    kv_heads(4),
)


def _period(config, index):
    """Return the kind of a block. By default every sixth block is full."""
    period = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern") or 6
    return every(period)(config, index)


# The first Gemma configs contain "gelu" but mean the tanh approximation.
_ACTIVATION = hidden_act("hidden_act", "gelu_pytorch_tanh", gelu="gelu_pytorch_tanh")
GEMMA = Family(
    "GemmaForCausalLM",
    parts=(*_HEADS, kv_heads(16), _ACTIVATION),
    fixed=_FIXED,
    supported_values=_REFUSED,
    ids=_IDS,
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    parts=(
        *_HEADS,
        *_CAPS,
        Blocks(kind_rule=every(2), window=4096, has_types=True),
        Field("soft_cap", "attn_logit_softcapping", 50.0, takes_null=True),
        Field("logits_soft_cap", "final_logit_softcapping", 30.0, takes_null=True),
    ),
    fixed={**_FIXED, "norm_placement": "sandwich"},
    supported_values=_REFUSED,
    ids=_IDS,
    norms=_NORMS,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    parts=(
        *_HEADS,
        *_CAPS,
        epsilon(1e-6, same=("qk_norm_epsilon",)),
        Blocks(
            base=1e6,
            sliding_base=1e4,
            kind_rule=_period,
            window=4096,
            has_types=True,
            per_kind=True,
            base_keys={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        ),
        Field("soft_cap", "attn_logit_softcapping", None),
        Field("logits_soft_cap", "final_logit_softcapping", None),
    ),
    fixed={**_FIXED, "norm_placement": "sandwich", "qk_norm": "rms_norm_unit_offset"},
    supported_values=_REFUSED,
    ids=_IDS,
    norms=_NORMS,
)
