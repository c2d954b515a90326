"""Llama 1 to 3, and decoders that differ from it in a few config keys.

Reference:
    - [Touvron et al., 2023, LLaMA](https://arxiv.org/abs/2302.13971)
    - [Grattafiori et al., 2024, Llama 3](https://arxiv.org/abs/2407.21783)
    - [Jiang et al., 2023, Mistral 7B](https://arxiv.org/abs/2310.06825)
    - [Yang et al., 2024, Qwen2](https://arxiv.org/abs/2407.10671)
    - [Yang et al., 2025, Qwen3](https://arxiv.org/abs/2505.09388)
    - [Abdin et al., 2024, Phi-3](https://arxiv.org/abs/2404.14219)
    - [Lozhkov et al., 2024, StarCoder 2](https://arxiv.org/abs/2402.19173)
    - [Bellagente et al., 2024, Stable LM 2](https://arxiv.org/abs/2402.17834)
    - [Parmar et al., 2024, Nemotron-4](https://arxiv.org/abs/2402.16819)
    - Seed-OSS, SmolLM3, Granite, Arcee, Helium, ERNIE 4.5, Ministral 3 and HunYuan:
      their published code
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import FULL, SLIDING, Blocks, always_sliding
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.parallel import parallel_residual
from dtransformer.models.pretrained.families.parts import (
    TIED,
    Field,
    epsilon,
    head_dim,
    hidden_act,
    kv_heads,
    query_scale,
    reciprocal,
)

DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_PLAIN = {"attention_bias": False, "mlp_bias": False}


def _last_slide(config, index):
    """Return the kind of a block. Blocks after the first `max_window_layers` may slide."""
    is_last = index >= config.get("max_window_layers", 28)
    return SLIDING if config.get("use_sliding_window") and is_last else FULL


def _slides_without_rotary(config, index):
    """Return the kind of a SmolLM3 block. Blocks without rotary positions may slide."""
    period = config.get("no_rope_layer_interval") or 4
    slides = config.get("use_sliding_window")
    has_rotary = config.get("no_rope_layers") or [
        int((i + 1) % period != 0) for i in range(index + 1)
    ]
    return SLIDING if slides and not has_rotary[index] else FULL


def _qwen_blocks(window):
    return Blocks(kind_rule=_last_slide, window=window, has_types=True, switch="use_sliding_window")


_MINISTRAL = {
    "type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LLAMA = Family("LlamaForCausalLM", supported_values=_PLAIN, ids=DEFAULT_IDS)
MISTRAL = Family(
    "MistralForCausalLM",
    # A missing key means 4096, as in the first Mistral.
    parts=(kv_heads(8), Blocks(kind_rule=always_sliding, window=4096)),
    ids=DEFAULT_IDS,
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    parts=(
        kv_heads(8),
        head_dim(128),
        epsilon(1e-5),
        Blocks(base=1e6, kind_rule=always_sliding, scaling=_MINISTRAL),
    ),
    ids={**DEFAULT_IDS, "pad_token_id": 11},
)
QWEN2 = Family("Qwen2ForCausalLM", parts=(_qwen_blocks(4096),), fixed={"qkv_bias": True})
QK_EPSILON = epsilon(1e-6, same=("qk_norm_epsilon",))
QWEN3 = Family(
    "Qwen3ForCausalLM",
    parts=(QK_EPSILON, kv_heads(32), head_dim(128), _qwen_blocks(4096)),
    fixed={"qk_norm": "rms_norm"},
    supported_values={"attention_bias": False},
)
PHI3 = Family(
    "Phi3ForCausalLM",
    parts=(
        epsilon(1e-5),
        Blocks(kind_rule=always_sliding, is_partial=True),
        Field("dropout_rate", "resid_pdrop", 0.0),
        Field("embedding_dropout_rate", "embd_pdrop", 0.0),
    ),
    attention=paths.FUSED_ATTENTION,
    dense=paths.FUSED_GATED,
    ids={**DEFAULT_IDS, "eos_token_id": 32000, "pad_token_id": 32000},
)
STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    parts=(
        kv_heads(2),
        epsilon(1e-5, "norm_epsilon", none_value=1e-5),
        Blocks(kind_rule=always_sliding),
        hidden_act(default="gelu_pytorch_tanh"),
        Field("use_bias", "use_bias", True, same=("qkv_bias",)),
        Field("dropout_rate", "residual_dropout", 0.0),
        Field("embedding_dropout_rate", "embedding_dropout", 0.0),
        TIED,
    ),
    fixed={"norm": "layer_norm", "gated": False},
    dense={"mlp.c_fc": paths.MAPPING, "mlp.c_proj": paths.PROJECTION},
    ids={"bos_token_id": 50256, "eos_token_id": 50256},
)
STABLELM = Family(
    "StableLmForCausalLM",
    parts=(
        kv_heads(32),
        epsilon(1e-5, "layer_norm_eps", none_value=1e-5),
        Blocks(fraction=0.25),
        Field("qkv_bias", "use_qkv_bias", False),
        Field("dropout_rate", "hidden_dropout", 0.0),
        parallel_residual(False, "parallel_one_norm"),
    ),
    fixed={"norm": "layer_norm", "embedding_dropout_rate": 0.0},
    supported_values={"qk_layernorm": False},
    ids={"bos_token_id": 0, "eos_token_id": 0},
)
SEED_OSS = Family(
    "SeedOssForCausalLM",
    parts=(
        kv_heads(8),
        head_dim(128),
        Field("qkv_bias", "attention_bias", True),
        Field("dropout_rate", "residual_dropout", 0.1),
        Field("attention_dropout_rate", "attention_dropout", 0.1),
    ),
    fixed={"embedding_dropout_rate": 0.0},
    supported_values={"attention_out_bias": False, "mlp_bias": False},
    ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
)
SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    parts=(
        kv_heads(4),
        Blocks(
            base=2e6,
            kind_rule=_slides_without_rotary,
            has_types=True,
            switch="use_sliding_window",
            rotary_blocks=("no_rope_layers", "no_rope_layer_interval", 4),
        ),
        TIED,
    ),
    supported_values=_PLAIN,
    ids={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
)
GRANITE = Family(
    "GraniteForCausalLM",
    parts=(
        Field("embedding_scale", "embedding_multiplier", 1.0),
        query_scale("attention_multiplier", 1.0),
        Field("residual_scale", "residual_multiplier", 1.0),
        Field("logits_scale", "logits_scaling", 1.0, reciprocal, reciprocal),
    ),
    supported_values=_PLAIN,
    ids=DEFAULT_IDS,
)
HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    parts=(epsilon(1e-5, same=("qk_norm_epsilon",)), Blocks(has_alpha=True)),
    fixed={"qk_norm": "rms_norm", "qk_norm_after_rotary": True},
    supported_values={"attention_bias": False},
    norms={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "self_attn.query_layernorm": "attention/query_norm",
        "self_attn.key_layernorm": "attention/key_norm",
    },
    ids={**DEFAULT_IDS, "pad_token_id": 0},
)
_UP = {"mlp.up_proj": paths.MAPPING, "mlp.down_proj": paths.PROJECTION}
_RELU2 = hidden_act(default="relu2")
ARCEE = Family(
    "ArceeForCausalLM",
    parts=(epsilon(1e-5), _RELU2),
    fixed={"gated": False},
    supported_values=_PLAIN,
    dense=_UP,
    ids={"bos_token_id": 128000, "eos_token_id": 128001},
)
NEMOTRON = Family(
    "NemotronForCausalLM",
    parts=(epsilon(1e-5, "norm_eps", none_value=1e-5), _RELU2, Blocks(fraction=0.5)),
    fixed={"norm": "layer_norm_unit_offset", "gated": False},
    supported_values=_PLAIN,
    dense=_UP,
    ids={"bos_token_id": 2, "eos_token_id": 3},
)
HELIUM = Family(
    "HeliumForCausalLM",
    parts=(epsilon(1e-8), kv_heads(20), head_dim(128), Blocks(base=1e5)),
    supported_values=_PLAIN,
    is_interleaved=True,
    ids={**DEFAULT_IDS, "pad_token_id": 3},
)
ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    parts=(
        epsilon(1e-5),
        kv_heads(2),
        head_dim(128),
        Blocks(base=5e5),
        Field("use_bias", "use_bias", False, same=("qkv_bias",)),
        TIED,
    ),
    is_interleaved=True,
    ids={**DEFAULT_IDS, "pad_token_id": 0},
)
