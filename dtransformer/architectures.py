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


def _bart(layers_of_each, hidden_size, num_heads):
    arguments = {
        "vocab_size": 50265,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "encoder_layers": layers_of_each,
        "decoder_layers": layers_of_each,
        "position_offset": 2,
        "embedding_norm": True,
        "pad_id": 1,
        "start_id": 2,
        "end_id": 2,
    }
    return Architecture(
        "EncoderDecoderLM", arguments, "Lewis et al., 2020, arXiv 1910.13461, §2 and §5"
    )


def _marian():
    arguments = {
        "vocab_size": 58101,
        "hidden_size": 512,
        "num_heads": 8,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "hidden_act": "silu",
        "positions": "sinusoidal_paper",
        "embedding_scale": None,
        "trains_padding": False,
        "pad_id": 58100,
        "start_id": 58100,
        "end_id": 0,
    }
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
    arguments = {
        "vocab_size": 37000,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "hidden_act": "relu",
        "positions": "sinusoidal_paper",
        "embedding_scale": None,
    }
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
