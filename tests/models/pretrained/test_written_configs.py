"""Configs written for a published family are read as the same network arguments."""

import pytest

from dtransformer.errors import InputError
from dtransformer.models import CausalLM
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.load import network_arguments

SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "ffn_hidden_size": 16}
LLAMA = {
    "dropout_rate": 0.0,
    "hidden_act": "silu",
    "positions": "rotary",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "embedding_scale": 1.0,
    "pad_id": None,
}
GEMMA = {
    **LLAMA,
    "hidden_act": "gelu_tanh",
    "embedding_scale": None,
    "pad_id": 0,
    "norm": "rms_norm_unit_offset",
    "norm_placement": "sandwich",
}
HALF = [{"window": None}, {"window": 4}]


def write_and_read(family, **arguments):
    network = CausalLM(30, **SIZES, **arguments)
    config = FAMILIES[family].to_hf(network.arguments)
    return config, network_arguments(
        FAMILIES[family], {"vocab_size": 30, **config, "tie_word_embeddings": True}, "config.json"
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("slides", [False, True])
def test_use_of_sliding_windows_is_written(family, slides):
    """Without the field, `transformers` uses no window and its masks fail."""
    options = {"qkv_bias": True} if family == "qwen2" else {"qk_norm": "rms_norm"}
    options |= {"block_pattern": HALF} if slides else {}
    config, arguments = write_and_read(family, **LLAMA, **options)
    assert config["use_sliding_window"] is slides
    assert arguments["block_pattern"] == (HALF if slides else None)


def test_default_query_scale_is_written():
    config, arguments = write_and_read("granite", **LLAMA)
    assert config["attention_multiplier"] == arguments["query_scale"] == 8**-0.5
    config, arguments = write_and_read(
        "gemma2", **GEMMA, block_pattern=[{"window": 4}, {"window": None}]
    )
    assert config["query_pre_attn_scalar"] == 8 and arguments["query_scale"] == 8**-0.5


def test_query_scale_that_a_config_cannot_contain_raises_an_error():
    with pytest.raises(InputError, match="`query_scale=0.09` must be 1/√n for an integer"):
        write_and_read("gemma2", **GEMMA, query_scale=0.09)


def test_ntk_base_depends_on_the_rotary_fraction():
    scaling = {"rotary_fraction": 0.25, "rotary_scaling": {"type": "ntk", "factor": 4.0}}
    arguments = {**LLAMA, "norm": "layer_norm", "hidden_size": 64, "num_heads": 2, **scaling}
    network = CausalLM(30, **{**SIZES, **arguments})
    base = FAMILIES["stablelm"].to_hf(network.arguments)["rope_theta"]
    assert base == pytest.approx(10000.0 * 4.0 ** (8 / 6))


def test_experts_of_default_size_are_written():
    options = {**LLAMA, "qk_norm": "rms_norm", "moe_config": {"expert_num": 4, "dropless": True}}
    options["moe_config"] |= {"expert_group_size": 4096}
    config, arguments = write_and_read("qwen3_moe", **options)
    assert config["moe_intermediate_size"] == 16
    assert arguments["moe_config"].ffn_hidden_size == SIZES["ffn_hidden_size"]


@pytest.mark.parametrize("family", ["seed_oss", "stablelm"])
def test_families_without_embedding_dropout_read_zero(family):
    options = {**LLAMA, "dropout_rate": 0.1, "head_dim": 8, "num_kv_heads": 1}
    options |= {"norm": "layer_norm"} if family == "stablelm" else {}
    _, arguments = write_and_read(family, **options)
    assert arguments["dropout_rate"] == 0.1 and arguments["embedding_dropout_rate"] == 0.0
