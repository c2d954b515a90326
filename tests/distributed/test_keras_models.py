"""On several ranks, a Keras model trains on texts and ragged rows, with and without XLA."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.trainers import Trainer
from harness.tolerances import PARITY_LOSS
from tests.shared_runs import on_ranks

ROWS, CLASSES = 25, 3
rng = np.random.default_rng(0)
IDS = rng.integers(0, 12, (ROWS, 4))
TAGS = rng.integers(0, CLASSES, ROWS)
TEXTS = tf.strings.reduce_join(tf.gather(tf.constant([*"abcdef"]), IDS // 2), -1, separator=" ")


def classifier(x, inputs):
    x = keras.layers.Embedding(
        12, 8, embeddings_initializer=keras.initializers.RandomNormal(seed=1)
    )(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    initializer = keras.initializers.GlorotUniform(1)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, kernel_initializer=initializer)(x))


def losses(model, data, **options):
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), classes, **options)
    return model.fit(data, epochs=2, verbose=0).history["loss"]


def assert_same_losses_as_keras(make, data, **options):
    """Train on batches whose last one has a single row, so that one rank has no row."""
    data = tf.data.Dataset.from_tensor_slices(data).batch(8)
    expected = losses(make(), data)
    np.testing.assert_allclose(losses(Trainer(make()), data, **options), expected, rtol=PARITY_LOSS)


def ids_model():
    inputs = keras.Input((4,), dtype="int32")
    return classifier(inputs, inputs)


@on_ranks("dp2@2x1+shard2")
def test_embedding_with_sparse_gradients_trains_under_xla():
    assert_same_losses_as_keras(ids_model, (IDS, TAGS), jit_compile=True)


@on_ranks("dp2@2x1+shard2")
def test_text_vectorization_trains_on_ranks():
    def texts_model():
        inputs = keras.Input((1,), dtype="string")
        words = keras.layers.TextVectorization(12, output_sequence_length=4)
        words.adapt(TEXTS)
        return classifier(words(inputs), inputs)

    assert_same_losses_as_keras(texts_model, (TEXTS[:, None], TAGS))


@on_ranks("dp2@2x1+shard2")
def test_ragged_rows_with_unused_texts_train_on_ranks():
    def ragged_model():
        inputs = {
            "ids": keras.Input((None,), dtype="int32", ragged=True),
            "name": keras.Input((1,), dtype="string"),
        }
        return classifier(inputs["ids"], inputs)

    ragged = tf.RaggedTensor.from_row_lengths(IDS.reshape(-1), [3, 5] * 12 + [4])
    assert_same_losses_as_keras(ragged_model, ({"ids": ragged, "name": TEXTS[:, None]}, TAGS))
