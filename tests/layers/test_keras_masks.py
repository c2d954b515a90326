"""Keras masks attached to tensors are used and propagated."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers import (
    Dropout,
    FeedForward,
    LayerNorm,
    Linear,
    PositionEmbedding,
    RMSNorm,
    TransformerDecoder,
    TransformerEncoder,
    TransformerEncoderLayer,
)

SIZES = {"hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 16}
IDS = np.array([[3, 1, 2, 0, 0], [5, 4, 0, 0, 0]])
MASK = tf.constant(IDS != 0)


@pytest.fixture
def embedded():
    return keras.layers.Embedding(6, 8, mask_zero=True)(IDS)


@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerEncoder])
def test_encoders_use_the_keras_mask(kind, embedded):
    layer = kind(**({"num_layers": 2} if kind is TransformerEncoder else {}), **SIZES)
    outputs = layer(embedded)
    np.testing.assert_array_equal(outputs, layer(tf.identity(embedded), MASK))
    assert np.abs(outputs - layer(tf.identity(embedded))).max() > 1e-3
    np.testing.assert_array_equal(_compat.get_keras_mask(outputs), MASK)


def test_decoder_uses_keras_masks_of_inputs_and_memory(embedded):
    decoder, x = TransformerDecoder(1, **SIZES), tf.identity(embedded)
    expected = decoder(x, MASK, x, MASK)
    np.testing.assert_array_equal(decoder(embedded, encoder_output=embedded), expected)
    np.testing.assert_array_equal(decoder(embedded, MASK, x, MASK), expected)
    assert np.abs(decoder(x, encoder_output=x) - expected).max() > 1e-3


def test_explicit_mask_overrides_keras_mask(embedded):
    layer, everything = TransformerEncoderLayer(**SIZES), tf.ones_like(MASK)
    np.testing.assert_array_equal(layer(embedded, everything), layer(tf.identity(embedded)))


LAYERS = {
    "norm": LayerNorm(),
    "rms_norm": RMSNorm(),
    "dropout": Dropout(0.1),
    "feed_forward": FeedForward(8, 16),
    "linear": Linear(4),
    "positions": PositionEmbedding(5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_positionwise_layers_propagate_the_mask(name, embedded):
    np.testing.assert_array_equal(_compat.get_keras_mask(LAYERS[name](embedded)), MASK)
