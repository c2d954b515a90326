"""Promise: on ranks a Keras model trains on whatever data Keras takes, in every way to compile it."""

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


def same_as_keras(make, data, **options):
    """Train on the last batch's one row, too, of which one rank has none."""
    data = tf.data.Dataset.from_tensor_slices(data).batch(8)
    expected = losses(make(), data)
    np.testing.assert_allclose(losses(Trainer(make()), data, **options), expected, rtol=PARITY_LOSS)


def of_ids():
    inputs = keras.Input((4,), dtype="int32")
    return classifier(inputs, inputs)


@on_ranks("dp2@2x1+shard2")
def test_a_table_whose_gradients_are_rows_under_xla():
    same_as_keras(of_ids, (IDS, TAGS), jit_compile=True)


@on_ranks("dp2@2x1+shard2")
def test_texts():
    def of_texts():
        inputs = keras.Input((1,), dtype="string")
        words = keras.layers.TextVectorization(12, output_sequence_length=4)
        words.adapt(TEXTS)
        return classifier(words(inputs), inputs)

    same_as_keras(of_texts, (TEXTS[:, None], TAGS))


@on_ranks("dp2@2x1+shard2")
def test_ragged_rows_beside_texts_that_nobody_reads():
    def of_rows():
        inputs = {
            "ids": keras.Input((None,), dtype="int32", ragged=True),
            "name": keras.Input((1,), dtype="string"),
        }
        return classifier(inputs["ids"], inputs)

    ragged = tf.RaggedTensor.from_row_lengths(IDS.reshape(-1), [3, 5] * 12 + [4])
    same_as_keras(of_rows, ({"ids": ragged, "name": TEXTS[:, None]}, TAGS))
