"""Promise: inputs [b·s, h] with a mask give the numbers of inputs [b, s, h], in their form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import (
    AttentionMask,
    MultiHeadAttention,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoder,
    VocabEmbedding,
    VocabHead,
)
from dtransformer.trainers import Trainer
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start

B, S, T, H = 4, 6, 5, 16
SIZES = {"hidden_size": H, "num_heads": 4, "ffn_hidden_size": 32}
DRY = {"attention_dropout_rate": 0.0, "hidden_dropout_rate": 0.0}
MASK, MEMORY_MASK = tf.linalg.band_part(tf.ones((B, T, T)), -1, 0), tf.ones((B, T, S))
RNG = np.random.default_rng(0)
X, MEMORY = (tf.constant(RNG.normal(size=(B, n, H)), "float32") for n in (T, S))
IDS = RNG.integers(1, 12, (8, T + 1))


def flat(x):
    return tf.reshape(x, [-1, x.shape[-1]])


CALLS = {
    "attention": (
        lambda: MultiHeadAttention(H, 4, 0.0, 0.0),
        lambda layer, x, memory: layer(x, memory, memory, MEMORY_MASK),
    ),
    "keys' mask": (
        lambda: MultiHeadAttention(H, 4, 0.0, 0.0),
        lambda layer, x, memory: layer(x, memory, memory, MEMORY_MASK[:, 0, :]),
    ),
    "encoder": (
        lambda: TransformerEncoder(2, **SIZES, **DRY),
        lambda layer, x, memory: layer(x, MASK),
    ),
    "decoder": (
        lambda: TransformerDecoderLayer(**SIZES, **DRY),
        lambda layer, x, memory: layer(x, MASK, memory, MEMORY_MASK),
    ),
    "both": (
        lambda: Transformer(1, 1, **SIZES, **DRY),
        lambda layer, x, memory: layer(memory, tf.ones((B, S, S)), x, MASK, MEMORY_MASK),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_in_two_dimensions(name):
    make, call = CALLS[name]
    layer = make()
    expected = call(layer, X, MEMORY)
    found = call(layer, flat(X), flat(MEMORY))
    assert found.shape == (B * T, H)
    np.testing.assert_array_equal(found, flat(expected))


def test_of_symbols():
    x, mask = keras.Input((H,)), keras.Input((T, T))
    outputs = TransformerEncoder(1, **SIZES)(x, mask)
    assert outputs.shape == (None, H)


def test_without_a_mask_the_number_of_sequences_is_missing():
    with pytest.raises(ValueError, match=r"query has the shape \[20, 16\]: give an attention mask"):
        MultiHeadAttention(H, 4)(flat(X), flat(X), flat(X))
    with pytest.raises(ValueError, match="inputs has the shape"):
        TransformerEncoder(1, **SIZES)(flat(X))


def test_rows_that_the_mask_does_not_divide():
    with pytest.raises(ValueError, match=r"expected a multiple of 3 rows: .* \[3, 5, 5\]"):
        TransformerEncoder(1, **SIZES)(flat(X), MASK[:3])


@keras.saving.register_keras_serializable("tests")
class Flat(keras.Model):
    """A language model whose blocks see [b·s, h], or [b, s, h]."""

    def __init__(self, dimensions):
        super().__init__()
        self.dimensions = dimensions
        self.causal = AttentionMask()
        self.embedding = VocabEmbedding(12, H)
        self.encoder = TransformerEncoder(2, **SIZES, **DRY)
        self.head = VocabHead(12)

    def call(self, ids):
        x, _ = self.embedding(ids)
        mask = self.causal(keras.ops.ones_like(ids))
        if self.dimensions == 2:
            x = keras.ops.reshape(x, [-1, H])
        x = self.encoder(x, mask)
        return self.head(keras.ops.reshape(x, [-1, T, H]))


def losses(dimensions):
    keras.backend.clear_session()  # names, on which first weights depend, begin again
    trainer = Trainer(Flat(dimensions))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    x, y = IDS[:, :-1], IDS[:, 1:]
    return trainer.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]


@on_mesh
def test_the_same_on_a_mesh():
    dtransformer.set_seed(0)
    expected = losses(3)
    np.testing.assert_allclose(losses(2), expected, rtol=PARITY_LOSS)
    start(data_parallel=2, model_parallel=2, sequence_parallel=True)
    np.testing.assert_allclose(losses(2), expected, rtol=PARITY_LOSS)
