"""Micro-batches reduce the memory of a step without changing its results."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss, Dropout
from dtransformer.trainers import Trainer
from tests.tolerances import TRAINING
from tests.trainers.small import Record, sentences, small_model


def fit(micro_batches, batch_size=6, num_rows=12, **options):
    with parallel_config(micro_batch_num=micro_batches):
        inputs, labels = sentences(num_rows)
        trainer = Trainer(small_model())
        trainer.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), CrossEntropyLoss(0.1, ignore_id=0), **options
        )
        record = Record()
        trainer.fit(
            inputs,
            labels,
            batch_size=batch_size,
            shuffle=False,
            epochs=2,
            verbose=0,
            callbacks=[record],
        )
    return record


METRIC = "sparse_categorical_accuracy"


@pytest.fixture(scope="module")
def full_batch():
    return fit(1, metrics=[METRIC])


@pytest.mark.parametrize(
    "micro_batches, options",
    [
        (2, {}),
        (4, {"metrics": [METRIC]}),
        pytest.param(6, {}, marks=pytest.mark.long),
        (3, {"run_eagerly": True}),
        pytest.param(2, {"jit_compile": True}, marks=pytest.mark.long),
    ],
)
def test_micro_batches_match_full_batches(micro_batches, options, full_batch):
    accumulated = fit(micro_batches, **options)
    for name in ("step_loss", "gradient_norm", "accuracy", *options.get("metrics", ())):
        np.testing.assert_allclose(accumulated[name], full_batch[name], rtol=TRAINING, err_msg=name)


def test_micro_batches_with_regularizers_and_sample_weights():
    def losses(micro_batches):
        with parallel_config(micro_batch_num=micro_batches):
            network = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(
                        4,
                        kernel_initializer=keras.initializers.GlorotUniform(1),
                        kernel_regularizer=keras.regularizers.L2(0.1),
                    ),
                    keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
                ]
            )
            trainer = Trainer(network)
            trainer.compile(keras.optimizers.SGD(0.1), "mse")
            rng = np.random.default_rng(0)
            x, y, weights = (rng.random(shape).astype("float32") for shape in ((8, 3), (8, 1), 8))
            for _ in range(3):
                logs = trainer.train_on_batch(x, y, sample_weight=weights, return_dict=True)
            return [float(logs[name]) for name in ("step_loss", "gradient_norm")]

    np.testing.assert_allclose(losses(3), losses(1), rtol=TRAINING)


def test_each_micro_batch_has_different_dropout_masks():
    class Ones(keras.Model):
        """Network that applies dropout to ones."""

        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")
            self.dropout = Dropout(0.5)

        def call(self, inputs, training=False):
            return self.dropout(tf.ones_like(inputs), training=training) * self.scale

    class RecordOutputs(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="keep")
            self.outputs = self.add_weight(shape=(4, 64), initializer="zeros", name="outputs")

        def update_state(self, labels, outputs, sample_weight=None):
            self.outputs.assign(outputs)

        def result(self):
            return tf.reduce_sum(self.outputs)

    with parallel_config(micro_batch_num=2):
        trainer, recorder = Trainer(Ones()), RecordOutputs()
        trainer.compile(keras.optimizers.SGD(0.0), "mse", metrics=[recorder])
        x = np.zeros((4, 64), "float32")
        trainer.train_on_batch(x, x)
        first_outputs = recorder.outputs.numpy()
        recorder.reset_state()
        trainer.train_on_batch(x, x)
    assert not np.array_equal(first_outputs[:2], first_outputs[2:])
    assert not np.array_equal(first_outputs, recorder.outputs.numpy()), (
        "The next step must have other masks."
    )


def shrinking_batches():
    """Yield batches of 8, 1 and 0 rows."""
    rng = np.random.default_rng(0)
    for rows in (8, 1, 0):
        yield rng.standard_normal((rows, 3)).astype("float32"), rng.integers(0, 4, rows)


# Keras fails on empty batches in eager mode.
@pytest.mark.parametrize("batches, options", [(3, {}), (2, {"run_eagerly": True})])
def test_batches_smaller_than_the_micro_batch_count_match_keras(batches, options):
    """An activity regularizer is a mean over rows, which is NaN for an empty micro-batch."""

    def train(make_trainer):
        keras.utils.set_random_seed(0)
        activity_regularizer = keras.regularizers.L2(0.1)
        layers = [
            keras.layers.Dense(8, "tanh", activity_regularizer=activity_regularizer),
            keras.layers.Dense(4),
        ]
        trainer = make_trainer(keras.Sequential([keras.Input((3,)), *layers]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], **options)
        specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None], "int64")
        data = tf.data.Dataset.from_generator(shrinking_batches, output_signature=specs)
        history = trainer.fit(data.take(batches), epochs=2, verbose=0).history
        return [*history["loss"], *history["accuracy"]]

    expected = train(lambda network: network)
    with parallel_config(micro_batch_num=3):
        np.testing.assert_allclose(train(Trainer), expected, rtol=TRAINING)
