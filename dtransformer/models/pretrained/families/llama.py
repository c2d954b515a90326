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

from collections.abc import Mapping, Sequence

from dtransformer.models.pretrained.families import weights
from dtransformer.models.pretrained.families.blocks import (
    FULL,
    SLIDING,
    Blocks,
    Rotary,
    Windows,
    rope_parameters,
)
from dtransformer.models.pretrained.families.family import Family, llama_keys
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    epsilon,
    head_dim,
    hidden_act,
    kv_heads,
    layer_norm_epsilon,
    query_scale,
    reciprocal,
)
from dtransformer.models.pretrained.families.parallel import parallel_residual

DEFAULT_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QK_EPSILON = epsilon(1e-6, same=("qk_norm_epsilon",))

LLAMA = Family("LlamaForCausalLM", supported_values=_NO_BIAS, ids=DEFAULT_IDS)
MISTRAL = Family(
    "MistralForCausalLM",
    # A missing window means 4096, as in the first Mistral.
    keys=llama_keys(kv_heads(8), Blocks(windows=Windows(4096))),
    ids=DEFAULT_IDS,
)
_MINISTRAL_SCALING = {
    "type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    keys=llama_keys(
        kv_heads(8),
        head_dim(128),
        epsilon(1e-5),
        Blocks(Rotary(1e6, scaling=_MINISTRAL_SCALING), Windows()),
    ),
    ids={**DEFAULT_IDS, "pad_token_id": 11},
)


class _QwenWindows(Windows):
    """Windows in all blocks after the first `max_window_layers`, if they are enabled."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        is_last = index >= config.get("max_window_layers", 28)
        return SLIDING if config.get("use_sliding_window") and is_last else FULL


_QWEN_BLOCKS = Blocks(windows=_QwenWindows(4096, has_layer_types=True, switch="use_sliding_window"))
QWEN2 = Family("Qwen2ForCausalLM", keys=llama_keys(_QWEN_BLOCKS), fixed={"qkv_bias": True})
QWEN3 = Family(
    "Qwen3ForCausalLM",
    keys=llama_keys(QK_EPSILON, kv_heads(32), head_dim(128), _QWEN_BLOCKS),
    fixed={"qk_norm": "rms_norm"},
    supported_values={"attention_bias": False},
)
PHI3 = Family(
    "Phi3ForCausalLM",
    keys=llama_keys(
        epsilon(1e-5),
        Blocks(Rotary(has_fraction=True), Windows()),
        Key("resid_pdrop", "dropout_rate", 0.0),
        Key("embd_pdrop", "embedding_dropout_rate", 0.0),
    ),
    weights=weights.llama_weights(
        attention=weights.FUSED_ATTENTION, feed_forward=weights.FUSED_GATED
    ),
    ids={**DEFAULT_IDS, "eos_token_id": 32000, "pad_token_id": 32000},
)
STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    keys=llama_keys(
        kv_heads(2),
        layer_norm_epsilon(1e-5, "norm_epsilon"),
        Blocks(windows=Windows()),
        hidden_act(default="gelu_pytorch_tanh"),
        Key("use_bias", "use_bias", True, same=("qkv_bias",)),
        Key("residual_dropout", "dropout_rate", 0.0),
        Key("embedding_dropout", "embedding_dropout_rate", 0.0),
        TIED,
    ),
    weights=weights.llama_weights(
        feed_forward={
            "mlp.c_fc": "feed_forward/mapping",
            "mlp.c_proj": "feed_forward/projection",
        }
    ),
    fixed={"norm": "layer_norm", "gated": False},
    ids={"bos_token_id": 50256, "eos_token_id": 50256},
)
STABLELM = Family(
    "StableLmForCausalLM",
    keys=llama_keys(
        kv_heads(32),
        layer_norm_epsilon(1e-5),
        Blocks(Rotary(fraction=0.25)),
        Key("use_qkv_bias", "qkv_bias", False),
        Key("hidden_dropout", "dropout_rate", 0.0),
        parallel_residual(False, "parallel_one_norm"),
    ),
    fixed={"norm": "layer_norm", "embedding_dropout_rate": 0.0},
    supported_values={"qk_layernorm": False},
    ids={"bos_token_id": 0, "eos_token_id": 0},
)
SEED_OSS = Family(
    "SeedOssForCausalLM",
    keys=llama_keys(
        kv_heads(8),
        head_dim(128),
        Key("attention_bias", "qkv_bias", True),
        Key("residual_dropout", "dropout_rate", 0.1),
        Key("attention_dropout", "attention_dropout_rate", 0.1),
    ),
    fixed={"embedding_dropout_rate": 0.0},
    supported_values={"attention_out_bias": False, "mlp_bias": False},
    ids={"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
)


class _SmolWindows(Windows):
    """Windows in blocks without rotary positions, which `no_rope_layers` marks with 0."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        is_enabled = config.get("use_sliding_window")
        has_rotary = self._rotary_flags(config, index + 1)[index]
        return SLIDING if is_enabled and not has_rotary else FULL

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind."""
        blocks = super().from_hf(config, kinds)
        flags = self._rotary_flags(config, len(blocks))
        without_rotary = {"rotary_base": None}
        return [block if flags[i] else block | without_rotary for i, block in enumerate(blocks)]

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks."""
        return {**super().to_hf(blocks), "no_rope_layers": [*map(int, self.has_rotary(blocks))]}

    def has_rotary(self, blocks: Sequence[Mapping]) -> list[bool]:
        """Return for each block whether it has rotary positions."""
        return [block["rotary_base"] is not None for block in blocks]

    def _rotary_flags(self, config, num_blocks):
        period = config.get("no_rope_layer_interval") or 4
        flags = config.get("no_rope_layers")
        return flags or [(i + 1) % period != 0 for i in range(num_blocks)]


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    keys=llama_keys(
        kv_heads(4),
        Blocks(Rotary(2e6), _SmolWindows(has_layer_types=True, switch="use_sliding_window")),
        TIED,
    ),
    supported_values=_NO_BIAS,
    ids={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
)
GRANITE = Family(
    "GraniteForCausalLM",
    keys=llama_keys(
        Key("embedding_multiplier", "embedding_scale", 1.0),
        query_scale("attention_multiplier", 1.0),
        Key("residual_multiplier", "residual_scale", 1.0),
        Key("logits_scaling", "logits_scale", 1.0, reciprocal, reciprocal),
    ),
    supported_values=_NO_BIAS,
    ids=DEFAULT_IDS,
)


class _AlphaRotary(Rotary):
    """Rotary positions whose scaling of type `"dynamic"` with `alpha` is `"ntk"` here."""

    def scaling_from_hf(self, name: str, options: dict) -> dict | None:
        """Return the argument `rotary_scaling`. Other options have no effect with `alpha`."""
        if name == "dynamic" and options.get("alpha"):
            return {"type": "ntk", "factor": options["alpha"]}
        return super().scaling_from_hf(name, options)

    def parameters_to_hf(self, block: Mapping) -> dict:
        """Return `rope_parameters` for a block's arguments."""
        scaling = block["rotary_scaling"]
        if scaling is None or scaling["type"] != "ntk":
            return super().parameters_to_hf(block)
        options = {"alpha": scaling["factor"], "factor": 1.0}
        return rope_parameters(block["rotary_base"], "dynamic", options, block["rotary_fraction"])


HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    keys=llama_keys(epsilon(1e-5, same=("qk_norm_epsilon",)), Blocks(_AlphaRotary())),
    weights=weights.llama_weights(
        norms={
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "feed_forward_norm",
            "self_attn.query_layernorm": "attention/query_norm",
            "self_attn.key_layernorm": "attention/key_norm",
        }
    ),
    fixed={"qk_norm": "rms_norm", "qk_norm_after_rotary": True},
    supported_values={"attention_bias": False},
    ids={**DEFAULT_IDS, "pad_token_id": 0},
)
_NOT_GATED = weights.llama_weights(
    feed_forward={
        "mlp.up_proj": "feed_forward/mapping",
        "mlp.down_proj": "feed_forward/projection",
    }
)
_RELU2 = hidden_act(default="relu2")
ARCEE = Family(
    "ArceeForCausalLM",
    keys=llama_keys(epsilon(1e-5), _RELU2),
    weights=_NOT_GATED,
    fixed={"gated": False},
    supported_values=_NO_BIAS,
    ids={"bos_token_id": 128000, "eos_token_id": 128001},
)
NEMOTRON = Family(
    "NemotronForCausalLM",
    keys=llama_keys(layer_norm_epsilon(1e-5, "norm_eps"), _RELU2, Blocks(Rotary(fraction=0.5))),
    weights=_NOT_GATED,
    fixed={"norm": "layer_norm_unit_offset", "gated": False},
    supported_values=_NO_BIAS,
    ids={"bos_token_id": 2, "eos_token_id": 3},
)
HELIUM = Family(
    "HeliumForCausalLM",
    keys=llama_keys(epsilon(1e-8), kv_heads(20), head_dim(128), Blocks(Rotary(1e5))),
    supported_values=_NO_BIAS,
    ids={**DEFAULT_IDS, "pad_token_id": 3},
    is_interleaved=True,
)
ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    keys=llama_keys(
        epsilon(1e-5),
        kv_heads(2),
        head_dim(128),
        Blocks(Rotary(5e5)),
        Key("use_bias", "use_bias", False, same=("qkv_bias",)),
        TIED,
    ),
    ids={**DEFAULT_IDS, "pad_token_id": 0},
    is_interleaved=True,
)
