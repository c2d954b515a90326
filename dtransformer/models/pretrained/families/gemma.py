"""Gemma 1 to 3.

Reference:
    - [Gemma Team, 2024, Gemma](https://arxiv.org/abs/2403.08295)
    - [Gemma Team, 2024, Gemma 2](https://arxiv.org/abs/2408.00118)
    - [Gemma Team, 2025, Gemma 3](https://arxiv.org/abs/2503.19786)
"""

from collections.abc import Mapping

from dtransformer.models.pretrained.families.blocks import (
    Blocks,
    Rotary,
    RotaryByKind,
    Windows,
    periodic_kind,
)
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    epsilon,
    head_dim,
    hidden_act,
    kv_heads,
    query_scale,
)
from dtransformer.models.pretrained.families.weights import NORMS, llama_weights

_COMMON = {
    "supported_values": {"attention_bias": False, "use_bidirectional_attention": False},
    "ids": {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
}
_FIXED = {"norm": "rms_norm_unit_offset", "embedding_scale": None}
# Gemma 2 and 3 also normalize the outputs of sublayers.
_SANDWICH_WEIGHTS = llama_weights(
    {
        **NORMS,
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "feed_forward_norm",
        "post_feedforward_layernorm": "feed_forward_output_norm",
    }
)
_KEYS = (
    head_dim(256),
    TIED,
    query_scale("query_pre_attn_scalar", 256, is_square=True),
    hidden_act("hidden_activation", "gelu_pytorch_tanh"),
    kv_heads(4),
)


class _Gemma3Windows(Windows):
    """Windows in all blocks except every sixth by default."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        period = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern")
        return periodic_kind(index, period or 6)


GEMMA = Family(
    "GemmaForCausalLM",
    keys=llama_keys(
        head_dim(256),
        TIED,
        kv_heads(16),
        # The first Gemma configs contain "gelu" but mean the tanh approximation.
        hidden_act("hidden_act", "gelu_pytorch_tanh", gelu="gelu_pytorch_tanh"),
    ),
    fixed=_FIXED,
    **_COMMON,
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    keys=llama_keys(
        *_KEYS,
        Blocks(windows=Windows(4096, period=2, has_layer_types=True)),
        Key("attn_logit_softcapping", "soft_cap", 50.0, takes_null=True),
        Key("final_logit_softcapping", "logits_soft_cap", 30.0, takes_null=True),
    ),
    weights=_SANDWICH_WEIGHTS,
    fixed={**_FIXED, "norm_placement": "sandwich"},
    **_COMMON,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    keys=llama_keys(
        *_KEYS,
        epsilon(1e-6, same=("qk_norm_epsilon",)),
        Blocks(
            RotaryByKind(full=Rotary(1e6), sliding=Rotary(1e4, base_key="rope_local_base_freq")),
            _Gemma3Windows(4096, has_layer_types=True),
        ),
        Key("attn_logit_softcapping", "soft_cap", None),
        Key("final_logit_softcapping", "logits_soft_cap", None),
    ),
    weights=_SANDWICH_WEIGHTS,
    fixed={**_FIXED, "norm_placement": "sandwich", "qk_norm": "rms_norm_unit_offset"},
    **_COMMON,
)
