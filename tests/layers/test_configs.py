"""Layers and models can be recreated from their configs."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig, layers
from dtransformer.layers import (
    FeedForward,
    Transformer,
    TransformerEncoder,
)
from dtransformer.layers.base import Layer
from dtransformer.models import TranslationTransformer
from tests.layers.test_weights import by_path

LAYER_OPTIONS = {
    "AttentionMask": ({}, [(2, 4)]),
    "CrossEntropyLoss": ({"label_smoothing": 0.1, "ignore_id": 3, "vocab_size": 9}, None),
    "DistillationLoss": (
        {"temperature": 1.5, "hard_loss_weight": 0.25, "divergence": "reverse_kl"},
        None,
    ),
    "Dropout": ({"rate": 0.25}, [(2, 4)]),
    "FeedForward": (
        {
            "hidden_size": 12,
            "ffn_hidden_size": 7,
            "dropout_rate": 0.2,
            "hidden_act": "relu",
            "kernel_initializer": "he_normal",
        },
        [(2, 4, 12)],
    ),
    "FixedSparseAttention": (
        {
            "num_heads": 3,
            "size_per_head": 4,
            "block_size": 1,
            "seq_length": 8,
            "num_different_global_patterns": 2,
            "global_size": 1,
        },
        [(2, 8, 12)] * 3,
    ),
    "LatentAttention": (
        {
            "hidden_size": 12,
            "num_heads": 3,
            "latent": {"kv_rank": 5, "rotary_dim": 2, "value_dim": 3, "query_rank": None},
            "head_dim": 6,
            "hidden_dropout_rate": 0.2,
            "qkv_bias": False,
        },
        [(2, 4, 12)] * 3,
    ),
    "LayerNorm": ({"epsilon": 0.1, "compute_type": "float64"}, [(2, 12)]),
    "Linear": (
        {"units": 5, "use_bias": False, "parallel": "row", "kernel_initializer": "ones"},
        [(2, 12)],
    ),
    "MaskedLMHead": (
        {
            "vocab_size": 10,
            "hidden_size": 12,
            "hidden_act": "relu",
            "norm_epsilon": 0.1,
            "use_bias": False,
            "tied": False,
        },
        [(2, 4, 12)],
    ),
    "MultiHeadAttention": (
        {
            "hidden_size": 12,
            "num_heads": 3,
            "hidden_dropout_rate": 0.2,
            "attention_dropout_rate": 0.3,
            "softmax_compute_type": "float64",
            "kernel_initializer": "he_normal",
            "rotary": {"base": 100.0, "fraction": 0.5, "scaling": None},
            "qk_norm": {"kind": "rms_norm", "epsilon": 0.1, "after_rotary": True},
        },
        [(2, 4, 12)] * 3,
    ),
    "PoolingHead": ({"pooling": "last"}, [(2, 4, 12)]),
    "PositionEmbedding": (
        {"max_length": 6, "kind": "learned", "initializer": "he_normal", "offset": 2},
        [(2, 4, 12)],
    ),
    "RMSNorm": ({"epsilon": 0.1, "compute_type": "float64"}, [(2, 12)]),
    "SequenceHead": (
        {
            "num_labels": 3,
            "pooling": "last",
            "hidden_act": "relu",
            "use_bias": False,
            "dropout_rate": 0.1,
        },
        [(2, 4, 12)],
    ),
    "TokenHead": ({"num_labels": 3, "use_bias": False, "dropout_rate": 0.1}, [(2, 4, 12)]),
    "TokenTypeEmbedding": ({"num_types": 3, "initializer": "he_normal"}, [(2, 4, 12), (2, 4)]),
    "VocabEmbedding": (
        {"vocab_size": 10, "embedding_size": 12, "initializer": "he_normal"},
        [(2, 4)],
    ),
    "VocabHead": (
        {"vocab_size": 10, "use_bias": True, "tied": False, "kernel_initializer": "he_normal"},
        [(2, 4, 12)],
    ),
}
BLOCK_OPTIONS = {
    "hidden_size": 12,
    "num_heads": 3,
    "ffn_hidden_size": 7,
    "attention_dropout_rate": 0.3,
    "hidden_dropout_rate": 0.2,
    "hidden_act": "relu",
    "post_layernorm_residual": True,
    "layernorm_compute_type": "float64",
    "softmax_compute_type": "float64",
}
X, IDS = (2, 4, 12), (2, 4)
MOE = dataclasses.asdict(MoEConfig(expert_num=3, num_experts_chosen=2, shared_experts=1))
LAYER_OPTIONS |= {
    "MoE": ({**LAYER_OPTIONS["FeedForward"][0], "moe_config": MOE}, [X]),
    "Router": ({"moe_config": MOE, "kernel_initializer": "he_normal"}, [X]),
    "TransformerEncoderLayer": (BLOCK_OPTIONS, [X]),
    "TransformerDecoderLayer": (BLOCK_OPTIONS, [X, (2, 4, 4), X]),
    "TransformerEncoder": (
        {"num_layers": 2, "offset": 1, "network_layers": 5, **BLOCK_OPTIONS},
        [X],
    ),
    "TransformerDecoder": (
        {"num_layers": 2, "offset": 1, "network_layers": 5, **BLOCK_OPTIONS},
        [X, (2, 4, 4), X],
    ),
    "Transformer": (
        {"encoder_layers": 2, "decoder_layers": 1, **BLOCK_OPTIONS},
        [X, IDS, X, (2, 4, 4)],
    ),
}
PUBLIC = [
    name
    for name in layers.__all__
    if isinstance(getattr(layers, name), type)
    and issubclass(getattr(layers, name), keras.layers.Layer)
    and name not in ("Layer", "TransformerBlock", "BlockStack")  # Base classes.
]


def run(layer, shapes):
    rng = np.random.default_rng(0)
    tensors = [tf.constant(rng.integers(0, 2, shape), layer.compute_dtype) for shape in shapes]
    if isinstance(layer, layers.LatentAttention):  # Supports only self-attention.
        tensors = tensors[:1] * 3
    return tf.nest.flatten(layer(*tensors))


@pytest.mark.parametrize("name", PUBLIC)
def test_layer_config_round_trip(name):
    options, shapes = LAYER_OPTIONS[name]
    cls = getattr(layers, name)
    layer = cls(**options, name="the_layer", dtype="mixed_bfloat16")
    restored = cls.from_config(layer.get_config())
    assert type(restored) is cls and restored.name == "the_layer"
    assert restored.dtype_policy.name == "mixed_bfloat16"
    config = restored.get_config()
    assert config == layer.get_config()
    for option, value in options.items():
        assert config[option] == value, option
    # Through JSON, as Keras saves models.
    stored = keras.saving.serialize_keras_object(layer)
    revived = keras.saving.deserialize_keras_object(stored)
    assert type(revived) is cls and revived.get_config() == layer.get_config()
    if shapes is None:
        return
    outputs = run(layer, shapes)
    for copy in (restored, revived):
        for expected, actual in zip(outputs, run(copy, shapes), strict=True):
            np.testing.assert_array_equal(tf.cast(actual, "float64"), tf.cast(expected, "float64"))
        assert by_path(copy).keys() == by_path(layer).keys()


@keras.saving.register_keras_serializable("tests")
def half(x):
    return 0.5 * x


@pytest.mark.parametrize(
    "make, shapes",
    [
        (lambda: FeedForward(12, 7, hidden_act=half, name="it"), [X]),
        (lambda: TransformerEncoder(1, 12, 3, 7, hidden_act=half, name="it"), [X]),
        (lambda: Transformer(1, 1, 12, 3, 7, hidden_act=half, name="it"), [X, IDS, X, (2, 4, 4)]),
    ],
    ids=["FeedForward", "TransformerEncoder", "Transformer"],
)
def test_custom_activation_survives_config_round_trip(make, shapes):
    layer = make()
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    for expected, actual in zip(run(layer, shapes), run(restored, shapes), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_model_config_round_trip():
    options = {
        "source_vocab_size": 11,
        "target_vocab_size": 9,
        "hidden_size": 12,
        "num_heads": 3,
        "ffn_hidden_size": 7,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "dropout_rate": 0.2,
        "attention_dropout_rate": 0.3,
        "embedding_dropout_rate": 0.4,
        "hidden_act": "gelu",
        "positions": "learned",
        "max_source_length": 8,
        "max_target_length": 7,
        "shared_embeddings": False,
        "tied_head": True,
        "head_bias": True,
        "post_layernorm_residual": True,
        "pad_id": 1,
        "start_id": 0,
        "end_id": 2,
    }
    model = TranslationTransformer(**options, dtype="mixed_bfloat16")
    stored = keras.saving.serialize_keras_object(model)
    restored = keras.saving.deserialize_keras_object(stored)
    assert type(restored) is TranslationTransformer
    for copy in (restored, TranslationTransformer.from_config(model.get_config())):
        assert copy.get_config() == model.get_config()
        assert {option: copy.get_config()[option] for option in options} == options
        assert copy.dtype_policy.name == "mixed_bfloat16"
        model.build()
        copy.build()
        for path, value in by_path(model).items():
            np.testing.assert_array_equal(by_path(copy)[path], value, path)


def test_zero_rates_survive_config_round_trip():
    """Rates of 0 are stored, not omitted."""
    model = TranslationTransformer(
        11, attention_dropout_rate=0.0, embedding_dropout_rate=0, dropout_rate=0.3
    )
    assert model.get_config()["attention_dropout_rate"] == 0.0
    assert model.get_config()["embedding_dropout_rate"] == 0.0
    assert model.source_dropout.rate == 0.0
    assert model.transformer.encoder.blocks[0].attention.attention_dropout.rate == 0.0


def test_custom_layer_needs_no_get_config():
    """Arguments are read from the attributes of the same names."""

    class Scaled(Layer):
        def __init__(self, factor, power=1, **kwargs):
            super().__init__(**kwargs)
            self.factor, self.power = factor, power

        def call(self, inputs):
            return inputs**self.power * self.factor

    restored = Scaled.from_config(Scaled(3, power=2, name="squared", dtype="float16").get_config())
    assert (restored.name, restored.factor, restored.power, restored.compute_dtype) == (
        "squared",
        3,
        2,
        "float16",
    )


def test_attention_loads_configs_with_flat_options():
    """Earlier versions stored rotary positions and norms of queries and keys as separate options."""
    flat = {
        "hidden_size": 16,
        "num_heads": 2,
        "rotary_base": 50.0,
        "rotary_fraction": 0.5,
        "rotary_scaling": {"type": "linear", "factor": 2.0},
        "qk_norm": "rms_norm",
        "qk_norm_epsilon": 0.1,
        "qk_norm_after_rotary": True,
    }
    layer = layers.MultiHeadAttention.from_config(flat)
    assert layer.rotary == layers.Rotary(50.0, 0.5, {"type": "linear", "factor": 2.0})
    assert layer.qk_norm == layers.QKNorm("rms_norm", 0.1, after_rotary=True)
    without = {"rotary_base": None, "rotary_fraction": 1.0, "rotary_scaling": None, "qk_norm": None}
    layer = layers.MultiHeadAttention.from_config({**flat, **without})
    assert layer.rotary is None and layer.qk_norm is None
