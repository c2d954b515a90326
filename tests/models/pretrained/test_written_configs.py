"""Promise: a network's config, written as a published one, is read as the network's arguments."""

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


def written(family, **own):
    network = CausalLM(30, **SIZES, **own)
    found = FAMILIES[family].config(network.arguments)
    return found, network_arguments(
        FAMILIES[family], {"vocab_size": 30, **found, "tie_word_embeddings": True}, "config.json"
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("slides", [False, True])
def test_windows_are_said_to_be_used(family, slides):
    """`transformers` takes no window without the field, and its masks fail."""
    own = {"qkv_bias": True} if family == "qwen2" else {"qk_norm": "rms_norm"}
    own |= {"block_pattern": HALF} if slides else {}
    found, again = written(family, **LLAMA, **own)
    assert found["use_sliding_window"] is slides
    assert again["block_pattern"] == (HALF if slides else None)


def test_the_usual_factor_of_queries_is_written():
    found, again = written("granite", **LLAMA)
    assert found["attention_multiplier"] == again["query_scale"] == 8**-0.5
    found, again = written("gemma2", **GEMMA, block_pattern=[{"window": 4}, {"window": None}])
    assert found["query_pre_attn_scalar"] == 8 and again["query_scale"] == 8**-0.5


def test_a_factor_of_queries_that_no_config_says_is_refused():
    with pytest.raises(InputError, match="`query_scale=0.09` must be 1/√n for an integer"):
        written("gemma2", **GEMMA, query_scale=0.09)


def test_a_base_for_longer_texts_counts_the_features_that_turn():
    scaling = {"rotary_fraction": 0.25, "rotary_scaling": {"type": "ntk", "factor": 4.0}}
    own = {**LLAMA, "norm": "layer_norm", "hidden_size": 64, "num_heads": 2, **scaling}
    network = CausalLM(30, **{**SIZES, **own})
    base = FAMILIES["stablelm"].config(network.arguments)["rope_theta"]
    assert base == pytest.approx(10000.0 * 4.0 ** (8 / 6))


def test_experts_of_the_usual_size_are_written():
    own = {**LLAMA, "qk_norm": "rms_norm", "moe_config": {"expert_num": 4, "dropless": True}}
    own["moe_config"] |= {"expert_group_size": 4096}
    found, again = written("qwen3_moe", **own)
    assert found["moe_intermediate_size"] == 16
    assert again["moe_config"].ffn_hidden_size == SIZES["ffn_hidden_size"]


@pytest.mark.parametrize("family", ["seed_oss", "stablelm"])
def test_embeddings_have_no_dropout_where_theirs_have_none(family):
    own = {**LLAMA, "dropout_rate": 0.1, "head_dim": 8, "num_kv_heads": 1}
    own |= {"norm": "layer_norm"} if family == "stablelm" else {}
    _, again = written(family, **own)
    assert again["dropout_rate"] == 0.1 and again["embedding_dropout_rate"] == 0.0
