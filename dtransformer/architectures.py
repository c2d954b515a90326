"""The sizes of published models, as data: a kind of network and its arguments.

Numbers are those of the papers. `dtransformer.models.from_preset` makes networks of these sizes, and
`dtransformer.planner` says what to train them costs.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The size of a published model.

    Args:
        network: name of the class of the network in `dtransformer.models`.
        arguments: dict of its arguments.
        source: where they are published.
    """

    network: str
    arguments: dict
    source: str


def _gpt2(num_layers, hidden_size, num_heads):
    arguments = {
        "vocab_size": 50257,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "max_length": 1024,
        "hidden_act": "gelu_tanh",
        "embedding_scale": 1.0,
        "pad_id": None,
        "start_id": 50256,
        "end_id": 50256,
    }
    return Architecture("CausalLM", arguments, "Radford et al., 2019, table 2")


def _llama(source, num_layers, hidden_size, num_heads, ffn_hidden_size, **others):
    arguments = {
        "vocab_size": 32000,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "num_layers": num_layers,
        "dropout_rate": 0.0,
        "hidden_act": "silu",
        "positions": "rotary",
        "max_length": 2048,
        "tied_head": False,
        "embedding_scale": 1.0,
        "norm": "rms_norm",
        "gated": True,
        "use_bias": False,
        "pad_id": None,
        "start_id": 1,
        "end_id": 2,
    }
    return Architecture("CausalLM", {**arguments, **others}, source)


_LLAMA_1 = "Touvron et al., 2023, arXiv 2302.13971, table 2"
_LLAMA_2 = "Touvron et al., 2023, arXiv 2307.09288, table 1"
_LLAMA_3 = "Grattafiori et al., 2024, arXiv 2407.21783, table 3"
_LLAMA_2_ARGUMENTS = {"max_length": 4096, "norm_epsilon": 1e-5}
_LLAMA_3_ARGUMENTS = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "max_length": 8192,
    "norm_epsilon": 1e-5,
    "rotary_base": 500000.0,
    "start_id": 128000,
    "end_id": 128001,
}


def _llama_3_1(source, *sizes, factor, **others):
    scaling = {"type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    own = {"max_length": 131072, "rotary_scaling": scaling, **others}
    return _llama(source, *sizes, **{**_LLAMA_3_ARGUMENTS, **own})


def _llama_3_2(*sizes):
    own = {"factor": 32.0, "head_dim": sizes[1] // sizes[2], "tied_head": True}
    return _llama_3_1("Meta, 2024, Llama 3.2's model card", *sizes, **own)


_MISTRAL_ARGUMENTS = {"num_kv_heads": 8, "max_length": 32768, "norm_epsilon": 1e-5}


def _mistral():
    source = "Jiang et al., 2023, arXiv 2310.06825, table 1"
    return _llama(source, 32, 4096, 32, 14336, window=4096, **_MISTRAL_ARGUMENTS)


def _mixtral():
    source = "Jiang et al., 2024, arXiv 2401.04088, table 1"
    experts = {"expert_num": 8, "num_experts_chosen": 2, "dropless": True}
    experts["expert_group_size"] = 4096
    own = {"rotary_base": 1e6, "moe_config": experts}
    return _llama(source, 32, 4096, 32, 14336, **_MISTRAL_ARGUMENTS, **own)


def _qwen2(*sizes, num_kv_heads, vocab_size=152064, **others):
    own = {"qkv_bias": True, "rotary_base": 1e6, "max_length": 131072}
    own |= {"num_kv_heads": num_kv_heads, "vocab_size": vocab_size, **others}
    own |= {"start_id": 151643, "end_id": 151643}
    return _llama("Yang et al., 2024, arXiv 2407.10671, table 1", *sizes, **own)


def _qwen3(*sizes, **others):
    own = {"qk_norm": "rms_norm", "head_dim": 128, "num_kv_heads": 8, "vocab_size": 151936}
    own |= {"rotary_base": 1e6, "max_length": 40960, "start_id": 151643, "end_id": 151645}
    return _llama("Yang et al., 2025, arXiv 2505.09388, table 1", *sizes, **{**own, **others})


def _qwen3_moe(*sizes, num_experts=128, **others):
    experts = {"expert_num": num_experts, "num_experts_chosen": 8, "dropless": True}
    experts |= {"expert_group_size": 4096, "aux_loss_factor": 0.001, "ffn_hidden_size": sizes[-1]}
    return _qwen3(*sizes, num_kv_heads=4, moe_config=experts, **others)


_GEMMA_NORMS = {"norm": "rms_norm_unit_offset", "norm_placement": "sandwich"}
_GEMMA_CAPS = {"soft_cap": 50.0, "logits_soft_cap": 30.0}


def _gemma(source, *sizes, num_kv_heads, **others):
    own = {"vocab_size": 256000, "head_dim": 256, "num_kv_heads": num_kv_heads, "max_length": 8192}
    own |= {"norm": "rms_norm_unit_offset", "embedding_scale": None, "hidden_act": "gelu_tanh"}
    own |= {"tied_head": True, "pad_id": 0, "start_id": 2, "end_id": 1}
    return _llama(source, *sizes, **{**own, **others})


def _gemma2(*sizes, num_kv_heads, scale=256, **others):
    own = {**_GEMMA_NORMS, **_GEMMA_CAPS, "query_scale": scale**-0.5}
    own["block_pattern"] = [{"window": 4096}, {"window": None}]
    source = "Gemma Team, 2024, arXiv 2408.00118, table 1"
    return _gemma(source, *sizes, num_kv_heads=num_kv_heads, **own, **others)


def _gemma3(*sizes, num_kv_heads, window=1024, scale=256, factor=8.0, **others):
    own = {**_GEMMA_NORMS, "qk_norm": "rms_norm_unit_offset", "query_scale": scale**-0.5}
    own |= {"vocab_size": 262144, "max_length": 131072 if factor else 32768}
    scaling = {"type": "linear", "factor": factor} if factor else None
    local = {"window": window, "rotary_base": 1e4, "rotary_scaling": None}
    whole = {"window": None, "rotary_base": 1e6, "rotary_scaling": scaling}
    own["block_pattern"] = [local] * 5 + [whole]
    source = "Gemma Team, 2025, arXiv 2503.19786, table 1"
    return _gemma(source, *sizes, num_kv_heads=num_kv_heads, **{**own, **others})


def _olmo2(*sizes, **others):
    own = {"norm_placement": "output", "qk_norm": "rms_norm_all_heads", "vocab_size": 100352}
    own |= {"rotary_base": 5e5, "max_length": 4096, "pad_id": 100277, "end_id": 100257}
    return _llama("OLMo Team, 2025, arXiv 2501.00656, table 3", *sizes, **own, **others)


def _smollm3():
    own = {"num_kv_heads": 4, "vocab_size": 128256, "rotary_base": 5e6, "max_length": 65536}
    own |= {"block_pattern": [{}, {}, {}, {"rotary_base": None}], "tied_head": True}
    own |= {"start_id": 128000, "end_id": 128012}
    return _llama("Hugging Face, 2025, SmolLM3's model card", 36, 2048, 16, 11008, **own)


def _phi(source, *sizes, **others):
    return _llama(source, *sizes, **{"max_length": 4096, "norm_epsilon": 1e-5, **others})


_QWEN2_SMALL = {"vocab_size": 151936, "tied_head": True, "num_kv_heads": 2}


def _bert(num_layers, hidden_size, num_heads):
    arguments = {
        "vocab_size": 30522,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "next_sentence": True,
    }
    return Architecture("MaskedLM", arguments, "Devlin et al., 2019, arXiv 1810.04805, §3")


def _roberta(num_layers, hidden_size, num_heads):
    own = {
        "vocab_size": 50265,
        "num_token_types": 1,
        "position_offset": 2,
        "norm_epsilon": 1e-5,
        "next_sentence": False,
        "pad_id": 1,
    }
    arguments = {**_bert(num_layers, hidden_size, num_heads).arguments, **own}
    return Architecture("MaskedLM", arguments, "Liu et al., 2019, arXiv 1907.11692, table 9")


def _distilbert():
    arguments = {**_bert(6, 768, 12).arguments, "num_token_types": 0, "next_sentence": False}
    return Architecture("MaskedLM", arguments, "Sanh et al., 2019, arXiv 1910.01108, §3")


def _xlm_roberta(*sizes):
    arguments = {**_roberta(*sizes).arguments, "vocab_size": 250002}
    return Architecture("MaskedLM", arguments, "Conneau et al., 2020, arXiv 1911.02116, §3")


def _modernbert(num_layers, hidden_size, num_heads, ffn_hidden_size):
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers}
    whole = {"window": None, "rotary_base": 160000.0}
    near = {"window": 65, "rotary_base": 10000.0}
    blocks = [near if i % 3 else whole for i in range(num_layers)]
    blocks[0] = {**whole, "attention_norm": False}
    own = {"positions": "rotary", "norm": "layer_norm_without_beta", "norm_epsilon": 1e-5}
    own |= {
        "gated": True,
        "use_bias": False,
        "post_layernorm_residual": False,
        "num_token_types": 0,
    }
    own |= {"vocab_size": 50368, "ffn_hidden_size": ffn_hidden_size, "max_length": 8192}
    arguments = {**sizes, **own, "block_pattern": blocks, "pad_id": 50283}
    return Architecture("MaskedLM", arguments, "Warner et al., 2024, arXiv 2412.13663, table 4")


def _bart(layers_of_each, hidden_size, num_heads):
    sizes = {"vocab_size": 50265, "hidden_size": hidden_size, "num_heads": num_heads}
    layers = {"encoder_layers": layers_of_each, "decoder_layers": layers_of_each}
    ids = {"pad_id": 1, "start_id": 2, "end_id": 2}
    arguments = {**sizes, **layers, "position_offset": 2, "embedding_norm": True, **ids}
    return Architecture(
        "EncoderDecoderLM", arguments, "Lewis et al., 2020, arXiv 1910.13461, §2 and §5"
    )


def _nllb(layers_of_each, ffn_hidden_size):
    own = {"vocab_size": 256206, "hidden_act": "relu", "positions": "sinusoidal"}
    own |= {"embedding_scale": None, "post_layernorm_residual": False}
    own |= {"embedding_norm": False, "positions_after_padding": True}
    own["ffn_hidden_size"] = ffn_hidden_size
    arguments = {**_bart(layers_of_each, 1024, 16).arguments, **own}
    return Architecture(
        "EncoderDecoderLM", arguments, "NLLB Team, 2022, arXiv 2207.04672, table 30"
    )


def _marian():
    sizes = {"vocab_size": 58101, "hidden_size": 512, "num_heads": 8}
    layers = {"encoder_layers": 6, "decoder_layers": 6, "hidden_act": "silu"}
    own = {"positions": "sinusoidal_paper", "embedding_scale": None, "trains_padding": False}
    ids = {"pad_id": 58100, "start_id": 58100, "end_id": 0}
    arguments = {**sizes, **layers, **own, **ids}
    return Architecture(
        "EncoderDecoderLM", arguments, "Tiedemann and Thottingal, 2020, OPUS-MT, en-de"
    )


def _t5(num_layers, hidden_size, num_heads, ffn_hidden_size, head_dim=64, **others):
    """T5 1.0's, whose tables have entries up to a multiple of 128, as files do."""
    arguments = {
        "vocab_size": 32128,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "ffn_hidden_size": ffn_hidden_size,
        "encoder_layers": num_layers,
        "decoder_layers": num_layers,
        "hidden_act": "relu",
        "positions": "relative",
        "norm": "rms_norm",
        "use_bias": False,
        "post_layernorm_residual": False,
        "query_scale": 1.0,
        "scales_output": True,
        "pad_id": 0,
        "start_id": 0,
        "end_id": 1,
    }
    source = "Raffel et al., 2019, arXiv 1910.10683, §3.7"
    return Architecture("EncoderDecoderLM", {**arguments, **others}, source)


def _t5_1_1(*sizes, **others):
    """T5 1.1's: gated, with a head of its own; Shazeer, 2020, arXiv 2002.05202."""
    own = {"gated": True, "hidden_act": "gelu_tanh", "tied_head": False, "scales_output": False}
    return _t5(*sizes, **own, **others)


def _gpt(num_layers, hidden_size, num_heads, source="Narayanan et al., 2021, table 1"):
    """Megatron-LM's GPTs, whose 51,200 pieces are GPT-2's, padded to be sharded over 8 devices."""
    sizes = {"vocab_size": 51200, "max_length": 2048}
    arguments = {**_gpt2(num_layers, hidden_size, num_heads).arguments, **sizes}
    return Architecture("CausalLM", arguments, source)


def _transformer(hidden_size, num_heads, ffn_hidden_size):
    sizes = {"vocab_size": 37000, "hidden_size": hidden_size, "num_heads": num_heads}
    sizes |= {"ffn_hidden_size": ffn_hidden_size, "encoder_layers": 6, "decoder_layers": 6}
    own = {"hidden_act": "relu", "positions": "sinusoidal_paper", "embedding_scale": None}
    arguments = {**sizes, **own}
    return Architecture("EncoderDecoderLM", arguments, "Vaswani et al., 2017, table 3")


ARCHITECTURES = {
    "gpt2_small": _gpt2(12, 768, 12),
    "gpt2_medium": _gpt2(24, 1024, 16),
    "gpt2_large": _gpt2(36, 1280, 20),
    "gpt2_xl": _gpt2(48, 1600, 25),
    "gpt_1.7b": _gpt(24, 2304, 24),
    "gpt_3.6b": _gpt(30, 3072, 32),
    "gpt_7.5b": _gpt(36, 4096, 32),
    "gpt_18b": _gpt(40, 6144, 48),
    "gpt_22b": _gpt(48, 6144, 64, "Korthikanti et al., 2022, table 3"),
    "gpt_39b": _gpt(48, 8192, 64),
    "gpt_76b": _gpt(60, 10240, 80),
    "gpt_145b": _gpt(80, 12288, 96),
    "gpt_175b": _gpt(96, 12288, 96, "Brown et al., 2020, table 2.1"),
    "gpt_310b": _gpt(96, 16384, 128),
    "gpt_530b": _gpt(105, 20480, 128),
    "gpt_1t": _gpt(128, 25600, 160),
    "llama_7b": _llama(_LLAMA_1, 32, 4096, 32, 11008),
    "llama_13b": _llama(_LLAMA_1, 40, 5120, 40, 13824),
    "llama_33b": _llama(_LLAMA_1, 60, 6656, 52, 17920),
    "llama_65b": _llama(_LLAMA_1, 80, 8192, 64, 22016),
    "llama2_7b": _llama(_LLAMA_2, 32, 4096, 32, 11008, **_LLAMA_2_ARGUMENTS),
    "llama2_13b": _llama(_LLAMA_2, 40, 5120, 40, 13824, **_LLAMA_2_ARGUMENTS),
    "llama2_70b": _llama(_LLAMA_2, 80, 8192, 64, 28672, num_kv_heads=8, **_LLAMA_2_ARGUMENTS),
    "llama3_8b": _llama(_LLAMA_3, 32, 4096, 32, 14336, **_LLAMA_3_ARGUMENTS),
    "llama3_70b": _llama(_LLAMA_3, 80, 8192, 64, 28672, **_LLAMA_3_ARGUMENTS),
    "llama3.1_8b": _llama_3_1(_LLAMA_3, 32, 4096, 32, 14336, factor=8.0),
    "llama3.1_70b": _llama_3_1(_LLAMA_3, 80, 8192, 64, 28672, factor=8.0),
    "llama3.2_1b": _llama_3_2(16, 2048, 32, 8192),
    "llama3.2_3b": _llama_3_2(28, 3072, 24, 8192),
    "mistral_7b": _mistral(),
    "mixtral_8x7b": _mixtral(),
    "qwen2_0.5b": _qwen2(24, 896, 14, 4864, **_QWEN2_SMALL),
    "qwen2_1.5b": _qwen2(28, 1536, 12, 8960, **_QWEN2_SMALL),
    "qwen2_7b": _qwen2(28, 3584, 28, 18944, num_kv_heads=4),
    "qwen2_72b": _qwen2(80, 8192, 64, 29568, num_kv_heads=8),
    "qwen3_0.6b": _qwen3(28, 1024, 16, 3072, tied_head=True),
    "qwen3_1.7b": _qwen3(28, 2048, 16, 6144, tied_head=True),
    "qwen3_4b": _qwen3(36, 2560, 32, 9728, tied_head=True),
    "qwen3_8b": _qwen3(36, 4096, 32, 12288),
    "qwen3_14b": _qwen3(40, 5120, 40, 17408),
    "qwen3_32b": _qwen3(64, 5120, 64, 25600),
    "qwen3_30b_a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3_235b_a22b": _qwen3_moe(94, 4096, 64, 1536),
    "phi3_mini": _phi("Abdin et al., 2024, arXiv 2404.14219", 32, 3072, 32, 8192, vocab_size=32064),
    "phi4": _phi(
        "Abdin et al., 2024, arXiv 2412.08905",
        *(40, 5120, 40, 17920),
        vocab_size=100352,
        num_kv_heads=10,
        max_length=16384,
        rotary_base=250000.0,
    ),
    "smollm3_3b": _smollm3(),
    "gemma_2b": _gemma("arXiv 2403.08295, table 1", 18, 2048, 8, 16384, num_kv_heads=1),
    "gemma_7b": _gemma("arXiv 2403.08295, table 1", 28, 3072, 16, 24576, num_kv_heads=16),
    "gemma2_2b": _gemma2(26, 2304, 8, 9216, num_kv_heads=4),
    "gemma2_9b": _gemma2(42, 3584, 16, 14336, num_kv_heads=8),
    "gemma2_27b": _gemma2(46, 4608, 32, 36864, num_kv_heads=16, head_dim=128, scale=144),
    "gemma3_270m": _gemma3(18, 640, 4, 2048, num_kv_heads=1, window=512, factor=None),
    "gemma3_1b": _gemma3(26, 1152, 4, 6912, num_kv_heads=1, window=512, factor=None),
    "olmo2_7b": _olmo2(32, 4096, 32, 11008),
    "olmo2_13b": _olmo2(40, 5120, 40, 13824),
    "distilbert_base": _distilbert(),
    "xlm_roberta_base": _xlm_roberta(12, 768, 12),
    "xlm_roberta_large": _xlm_roberta(24, 1024, 16),
    "modernbert_base": _modernbert(22, 768, 12, 1152),
    "modernbert_large": _modernbert(28, 1024, 16, 2624),
    "nllb_600m": _nllb(12, 4096),
    "nllb_1.3b": _nllb(24, 8192),
    "bert_base": _bert(12, 768, 12),
    "bert_large": _bert(24, 1024, 16),
    "roberta_base": _roberta(12, 768, 12),
    "roberta_large": _roberta(24, 1024, 16),
    "bart_base": _bart(6, 768, 12),
    "bart_large": _bart(12, 1024, 16),
    "marian_base": _marian(),
    "transformer_base": _transformer(512, 8, 2048),
    "transformer_big": _transformer(1024, 16, 4096),
    "t5_small": _t5(6, 512, 8, 2048),
    "t5_base": _t5(12, 768, 12, 3072),
    "t5_large": _t5(24, 1024, 16, 4096),
    "t5_3b": _t5(24, 1024, 32, 16384, head_dim=128),
    "t5_11b": _t5(24, 1024, 128, 65536, head_dim=128),
    "t5_1.1_small": _t5_1_1(8, 512, 6, 1024),
    "t5_1.1_base": _t5_1_1(12, 768, 12, 2048),
    "t5_1.1_large": _t5_1_1(24, 1024, 16, 2816),
    "t5_1.1_xl": _t5_1_1(24, 2048, 32, 5120),
    "t5_1.1_xxl": _t5_1_1(24, 4096, 64, 10240),
}
