"""Invalid arguments of layers raise errors that name the allowed values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig, layers, parallel_config
from dtransformer.layers import (
    CrossEntropyLoss,
    Dropout,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Transformer,
    TransformerEncoder,
    TransformerEncoderLayer,
    VocabHead,
)
from dtransformer.models import CausalLM, TranslationTransformer
from tests.tolerances import LAYERS, assert_all_close


def model_with(**options):
    sizes = {"source_vocab_size": 11, "hidden_size": 12, "num_heads": 3}
    return TranslationTransformer(**{**sizes, **options})


def encoder_with(**options):
    sizes = {"num_layers": 1, "hidden_size": 12, "num_heads": 3, "ffn_hidden_size": 7}
    return TransformerEncoder(**{**sizes, **options})


@pytest.mark.parametrize("hidden_act", ["gelus", "", "get", "serialize", "Dense"])
def test_unknown_activation_error_lists_known_names(hidden_act):
    for make in (
        lambda: FeedForward(12, 7, hidden_act=hidden_act),
        lambda: encoder_with(hidden_act=hidden_act),
        lambda: model_with(hidden_act=hidden_act),
    ):
        with pytest.raises(ValueError, match=f"'{hidden_act}'") as caught:
            make()
        assert all(name in str(caught.value) for name in ("gelu_tanh", "relu", "silu", "tanh"))


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "silu", "tanh", tf.sin])
def test_accepts_keras_activations_and_callables(hidden_act):
    layer = FeedForward(12, 7, dropout_rate=0.0, hidden_act=hidden_act)
    x = np.random.default_rng(0).standard_normal((1, 2, 12)).astype("float32")
    layer(x)
    activation = hidden_act if callable(hidden_act) else keras.activations.get(hidden_act)
    inner = activation(x @ layer.mapping_kernel.numpy())
    expected = np.asarray(inner) @ layer.projection_kernel.numpy()
    assert_all_close({"output": layer(x)}, {"output": expected}, LAYERS["float32"])


@pytest.mark.parametrize("hidden_size, num_heads", [(12, 5), (12, 24), (16, 3)])
def test_num_heads_must_divide_hidden_size(hidden_size, num_heads):
    for make in (
        lambda: MultiHeadAttention(hidden_size, num_heads),
        lambda: encoder_with(hidden_size=hidden_size, num_heads=num_heads),
        lambda: model_with(hidden_size=hidden_size, num_heads=num_heads),
    ):
        with pytest.raises(ValueError, match=f"{num_heads}.*{hidden_size}"):
            make()


@pytest.mark.parametrize(
    "sizes, model_parallel",
    [
        ({"num_heads": 3, "hidden_size": 12}, 2),
        ({"num_heads": 4, "hidden_size": 12}, 3),
        ({"num_heads": 4, "hidden_size": 12, "ffn_hidden_size": 7}, 4),
    ],
)
def test_model_parallel_must_divide_sharded_sizes(sizes, model_parallel):
    with parallel_config(model_parallel=model_parallel):
        with pytest.raises(ValueError) as caught:
            encoder_with(**{"ffn_hidden_size": 12 * model_parallel, **sizes})
    message = str(caught.value)
    assert f"model_parallel={model_parallel}" in message
    wrong = {name: size for name, size in sizes.items() if size % model_parallel}
    assert all(f"{name}={size}" in message for name, size in wrong.items())


RATES = [
    (lambda rate: Dropout(rate), "rate"),
    (lambda rate: FeedForward(12, 7, dropout_rate=rate), "dropout_rate"),
    (lambda rate: MultiHeadAttention(12, 3, hidden_dropout_rate=rate), "hidden_dropout_rate"),
    (lambda rate: MultiHeadAttention(12, 3, attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: encoder_with(hidden_dropout_rate=rate), "dropout_rate"),
    (lambda rate: encoder_with(attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: model_with(dropout_rate=rate), "dropout_rate"),
    (lambda rate: model_with(attention_dropout_rate=rate), "attention_dropout_rate"),
    (lambda rate: model_with(embedding_dropout_rate=rate), "rate"),
    (lambda rate: layers.CrossEntropyLoss(rate), "label_smoothing"),
]


@pytest.mark.parametrize("make, name", RATES)
@pytest.mark.parametrize("rate", [1, 1.0, -0.1, 1.5, float("nan")])
def test_dropout_rate_out_of_range_raises(make, name, rate):
    with pytest.raises(ValueError, match=rf"{name}.*\[0, 1\).*{rate}"):
        make(rate)


@pytest.mark.parametrize("make, name", RATES)
@pytest.mark.parametrize("rate", ["0.1", True])
def test_dropout_rate_of_wrong_type_raises(make, name, rate):
    with pytest.raises(TypeError, match=f"{name}.*{rate}"):
        make(rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: FeedForward(size, 7),
        lambda size: FeedForward(12, size),
        lambda size: MultiHeadAttention(12, size),
        lambda size: layers.Linear(size),
        lambda size: layers.VocabEmbedding(size, 12),
        lambda size: layers.VocabEmbedding(10, size),
        lambda size: VocabHead(size),
        lambda size: layers.PositionEmbedding(size),
        lambda size: encoder_with(ffn_hidden_size=size),
        lambda size: model_with(source_vocab_size=size),
        lambda size: model_with(hidden_size=size),
        lambda size: model_with(decoder_layers=size),
        lambda size: model_with(max_source_length=size),
    ],
)
def test_sizes_must_be_positive_integers(make):
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"at least 1, got {size}"):
            make(size)
    for size in (2.0, "2", True):
        with pytest.raises(TypeError, match=f"must be an int, got {size!r}"):
            make(size)


@pytest.mark.parametrize("size", [-1, 1.5, "2", True, 0])
def test_invalid_decoder_layers_raise(size):
    with pytest.raises((TypeError, ValueError), match="layers"):
        Transformer(0, size, 12, 3, 7)


@pytest.mark.parametrize("encoder_layers", [-1, 1.5, "2"])
def test_invalid_encoder_layers_raise(encoder_layers):
    for make in (
        lambda: Transformer(encoder_layers, 1, 12, 3, 7),
        lambda: model_with(encoder_layers=encoder_layers),
    ):
        with pytest.raises((TypeError, ValueError), match="layers"):
            make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: layers.Linear(4, parallel="rows"), "'column', 'row' or None, got 'rows'"),
        (
            lambda: layers.PositionEmbedding(4, kind="rotary"),
            "one of learned, sinusoidal.*'rotary'",
        ),
        (lambda: model_with(positions="rotary"), "one of sinusoidal, .*, learned, got 'rotary'"),
        (lambda: model_with(target_vocab_size=9, shared_embeddings=True), "11.*9"),
    ],
)
def test_unknown_option_values_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SIZES = {"hidden_size": 8, "num_heads": 2}
BLOCK = {**SIZES, "ffn_hidden_size": 8}
MODEL = {"num_layers": 1, **SIZES}


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: TransformerEncoder(num_layers=True, **BLOCK),
            TypeError,
            "`num_layers` must be an int",
        ),
        (lambda: TransformerEncoder(num_layers=-1, **BLOCK), ValueError, "num_layers.*-1"),
        (lambda: LayerNorm(epsilon=-1), ValueError, "epsilon.*above 0"),
        (lambda: LayerNorm(epsilon=float("nan")), ValueError, "epsilon.*nan"),
        (lambda: RMSNorm(epsilon=0), ValueError, "epsilon.*above 0"),
        (
            lambda: TransformerEncoderLayer(**BLOCK, post_layernorm_residual="False"),
            TypeError,
            "`post_layernorm_residual` must be a bool, got 'False'",
        ),
        (lambda: CausalLM(10, **MODEL, pad_id=10), ValueError, "pad_id.*vocabulary of 10"),
        (lambda: CausalLM(10, **MODEL, ffn_hidden_size=0), ValueError, "ffn_hidden_size"),
        (
            lambda: TranslationTransformer(10, target_vocab_size=0, **SIZES),
            ValueError,
            "target_vocab_size",
        ),
        (
            lambda: MultiHeadAttention(8, 2, softmax_compute_type="int64"),
            ValueError,
            "softmax_compute_type.*float32.*'int64'",
        ),
        (lambda: CrossEntropyLoss(ignore_id=1.5), TypeError, "`ignore_id` must be an int or None"),
        (lambda: Linear(4, use_bias="no"), TypeError, "`use_bias` must be a bool"),
    ],
)
def test_arguments_are_checked_by_type_hint_and_range(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "layer",
    [
        layers.FeedForward(8, 16),
        layers.Linear(4),
        layers.PositionEmbedding(8),
        layers.VocabHead(5),
        layers.TransformerEncoderLayer(8, 2, 16),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_integer_inputs_raise(layer):
    with pytest.raises(TypeError, match="`inputs` must have a floating-point type, got int64"):
        layer(tf.ones((2, 3, 8), "int64"))


OF_SIXTEEN = {
    "FeedForward": (16, 8),
    "LayerNorm": (),
    "Linear": (4,),
    "MaskedLMHead": (6, 16, "gelu", 1e-5, True, False),
    "MoE": (16, 8),
    "PositionEmbedding": (5, "learned"),
    "RMSNorm": (),
    "Router": (MoEConfig(expert_num=2),),
    "SequenceHead": (2,),
    "TokenHead": (2,),
    "TokenTypeEmbedding": (2,),
    "VocabHead": (5,),
}


@pytest.mark.parametrize("name", OF_SIXTEEN)
def test_inputs_of_another_hidden_size_raise(name):
    options = {"moe_config": MoEConfig(expert_num=2)} if name == "MoE" else {}
    layer = getattr(layers, name)(*OF_SIXTEEN[name], **options)
    layer(tf.zeros((2, 3, 16)))
    with pytest.raises(ValueError, match=r"have value 16, but received .*\(2, 3, 12\)"):
        layer(tf.zeros((2, 3, 12)))


def test_missing_table_or_memory_raises():
    head, x = layers.VocabHead(6, tied=True), tf.zeros((2, 3, 12))
    with pytest.raises(ValueError, match="received no table, expected .*12"):
        head(x)
    with pytest.raises(ValueError, match=r"a table of shape \[6, 16\], expected .*12"):
        head(x, tf.zeros((6, 16)))
    decoder = layers.TransformerDecoder(1, hidden_size=12, num_heads=2, ffn_hidden_size=8)
    with pytest.raises(ValueError, match="`encoder_output` is missing"):
        decoder(x)


def test_integer_dtype_raises():
    with pytest.raises(ValueError, match="`dtype` must be a floating-point type, got 'int64'"):
        layers.TransformerEncoder(1, 8, 2, 16, dtype="int64")
