"""One config describes every network, and old configs keep loading."""

import dataclasses
import inspect

import pytest

from dtransformer import MoEConfig
from dtransformer.models import (
    AttentionConfig,
    BlockConfig,
    CausalLM,
    EncoderDecoderLM,
    MaskedLM,
    TransformerConfig,
    TranslationTransformer,
)
from dtransformer.transformer_config import FIELDS, GROUPS, NETWORKS, get_arguments

SIZES = {"hidden_size": 8, "num_heads": 2, "num_layers": 1}
CLASSES = CausalLM, MaskedLM, EncoderDecoderLM, TranslationTransformer


def test_config_and_arguments_create_the_same_network():
    config = TransformerConfig(
        vocab_size=50,
        **SIZES,
        attention=AttentionConfig(rotary_base=5000.0, num_kv_heads=1),
        block=BlockConfig(gated=True),
    )
    networks = [
        CausalLM(config),
        CausalLM(50, **SIZES, rotary_base=5000.0, num_kv_heads=1, gated=True),
        CausalLM(vocab_size=50, **SIZES, rotary_base=5000.0, num_kv_heads=1, gated=True),
    ]
    assert networks[0].get_config() == networks[1].get_config() == networks[2].get_config()
    assert all(network.config == config for network in networks)


@pytest.mark.parametrize("network", CLASSES)
def test_flat_arguments_restore_the_config(network):
    model = network(50, hidden_size=8, num_heads=2)
    assert TransformerConfig.from_arguments(network.__name__, **model.arguments) == model.config
    assert model.arguments.keys() == get_arguments(network.__name__).keys()


FLOAT32 = {
    "module": "keras",
    "class_name": "DTypePolicy",
    "config": {"name": "float32"},
    "registered_name": None,
}
# Config of a `CausalLM` that was saved before `TransformerConfig` existed.
OLD_CAUSAL_LM = {
    "name": "causal_lm", "dtype": FLOAT32, "vocab_size": 30, "hidden_size": 16, "num_heads": 2,
    "ffn_hidden_size": 64, "num_layers": 2, "dropout_rate": 0.1, "attention_dropout_rate": 0.1,
    "embedding_dropout_rate": 0.1, "hidden_act": "gelu", "positions": "learned",
    "max_length": 1024, "tied_head": True, "head_bias": True, "post_layernorm_residual": False,
    "pad_id": 0, "start_id": 2, "end_id": 3, "embedding_scale": None, "norm": "layer_norm",
    "norm_epsilon": None, "gated": False, "use_bias": True, "num_kv_heads": None, "head_dim": None,
    "qkv_bias": None, "rotary_base": 10000.0, "rotary_fraction": 1.0, "rotary_scaling": None,
    "window": None, "query_scale": None, "soft_cap": None, "qk_norm": None,
    "qk_norm_epsilon": None, "implementation": "auto", "prefix": False,
    "moe_config": dataclasses.asdict(MoEConfig(expert_num=4)), "moe_every": 2,
    "norm_placement": None, "residual_scale": 1.0, "block_pattern": [{"window": 2}, {}],
    "logits_scale": 1.0, "logits_soft_cap": None, "sinks": False, "latent": None,
    "qk_norm_after_rotary": False, "position_offset": 2,
}  # fmt: skip
OLD_TRANSLATION = {
    "name": "translation_transformer", "dtype": FLOAT32, "source_vocab_size": 30,
    "target_vocab_size": 40, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 64,
    "encoder_layers": 1, "decoder_layers": 2, "dropout_rate": 0.1, "attention_dropout_rate": 0.1,
    "embedding_dropout_rate": 0.1, "hidden_act": "relu", "positions": "learned",
    "max_source_length": 256, "max_target_length": 9, "shared_embeddings": False,
    "tied_head": True, "head_bias": False, "post_layernorm_residual": False, "pad_id": 0,
    "start_id": 2, "end_id": 3, "moe_config": None, "moe_every": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "network, saved", [(CausalLM, OLD_CAUSAL_LM), (TranslationTransformer, OLD_TRANSLATION)]
)
def test_configs_saved_before_the_class_existed_load(network, saved):
    model = network.from_config(saved)
    assert model.get_config() == saved


WRONG = [
    (TypeError, "no argument `hiden_size`, got 3; did you mean hidden_size", {"hiden_size": 3}),
    (TypeError, "no argument `encoder`, got 1; ", {"encoder": 1}),
    (TypeError, "`gated` must be a bool, got 1", {"gated": 1}),
    (TypeError, "`num_layers` must be an int, got 2.0", {"num_layers": 2.0}),
    (ValueError, "`num_kv_heads` must be at least 1, got 0", {"num_kv_heads": 0}),
    (ValueError, "`encoder_layers=2` does not apply to a CausalLM", {"encoder_layers": 2}),
    (ValueError, "`positions` must be one of learned, sinusoidal", {"positions": "relative"}),
    (ValueError, "`num_heads=3` does not divide `hidden_size=8`", {"num_heads": 3}),
    (ValueError, "`end_id` must be in the vocabulary of 50", {"end_id": 50}),
    (ValueError, "`prefix=True` does not work with `window=2`", {"prefix": True, "window": 2}),
]


@pytest.mark.parametrize("error, text, arguments", WRONG)
def test_errors_name_the_field(error, text, arguments):
    with pytest.raises(error, match=text):
        CausalLM(50, **{**SIZES, **arguments})


def test_config_of_another_network_or_with_arguments_raises():
    config = TransformerConfig("MaskedLM", vocab_size=50, **SIZES)
    assert config.block.post_layernorm_residual and config.block.norm_epsilon == 1e-12
    with pytest.raises(ValueError, match="network='MaskedLM'.*network='CausalLM'"):
        CausalLM(config)
    with pytest.raises(TypeError, match="a TransformerConfig and `num_heads`"):
        MaskedLM(config, num_heads=4)
    with pytest.raises(ValueError, match="`network` must be one of CausalLM, MaskedLM"):
        TransformerConfig("Encoder", vocab_size=50)


def test_constructors_have_few_arguments():
    for kind in (TransformerConfig, *GROUPS.values(), *CLASSES):
        assert len(inspect.signature(kind).parameters) <= 20, kind


def test_every_field_is_documented_once():
    documents = [inspect.getdoc(kind) for kind in (TransformerConfig, *GROUPS.values())]
    for name in FIELDS:
        assert sum(f"    {name}: " in text for text in documents) == 1, name
    assert {network for field in FIELDS.values() for network in field.networks} == set(NETWORKS)
