"""The order of shuffled rows depends only on the job's seed, the fit and the epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import ModelCheckpoint
from tests.trainers.small import dense_trainer, points

ROWS = 12


class RowRecorder(keras.callbacks.Callback):
    """Records the row indices of each batch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])

    def on_train_batch_end(self, batch, logs=None):
        inputs, _ = self.model._program.runner.logs.batch
        self.epochs[-1].append([int(x) for x in inputs[:, 0]])


def row_orders(trainer=None, **options):
    """Train and return the rows of all batches, by epoch."""
    rows, recorder = np.tile(np.arange(ROWS)[:, None], (1, 3)).astype("float32"), RowRecorder()
    options = {"batch_size": 4, "epochs": 3, "verbose": 0, **options}
    (trainer or dense_trainer()).fit(rows, rows[:, :1], callbacks=[recorder], **options)
    return recorder.epochs


def test_every_epoch_and_fit_has_a_different_order():
    trainer = dense_trainer()
    epochs = [*row_orders(trainer), *row_orders(trainer)]
    assert len({str(epoch) for epoch in epochs}) == 6
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(ROWS))


def test_order_does_not_depend_on_the_process():
    expected = row_orders()
    keras.utils.set_random_seed(5)
    assert row_orders() == expected
    assert row_orders(initial_epoch=1) == expected[1:]
    assert row_orders(shuffle=False) == 3 * [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]


def test_rows_are_shuffled_within_batches():
    for epoch in row_orders(shuffle="batch"):
        assert [sorted(batch) for batch in epoch] == row_orders(shuffle=False)[0]
        assert [sorted(batch) for batch in epoch] != epoch


def test_sparse_arrays_are_shuffled_like_dense_ones():
    x, y = points(ROWS)
    expected = dense_trainer().fit(x, y, 4, verbose=0).history["loss"]
    history = dense_trainer(network=_sparse_network()).fit(tf.sparse.from_dense(x), y, 4, verbose=0)
    assert history.history["loss"] == pytest.approx(expected)


def _sparse_network():
    initializer = keras.initializers.GlorotUniform(seed=1)
    layers = [
        keras.layers.Dense(4, activation="tanh", kernel_initializer=initializer),
        keras.layers.Dense(1, kernel_initializer=initializer),
    ]
    return keras.Sequential([keras.Input((3,), sparse=True), *layers])


def test_resumed_epoch_keeps_the_order(tmp_path):
    x, y = points(ROWS)
    options = {"batch_size": 4, "verbose": 0}
    expected = dense_trainer().fit(x, y, epochs=4, **options).history["loss"]
    checkpoint_callbacks = lambda: [ModelCheckpoint(tmp_path)]
    dense_trainer().fit(x, y, epochs=2, callbacks=checkpoint_callbacks(), **options)
    resumed = dense_trainer()
    history = resumed.fit(
        x, y, epochs=4, resume=True, callbacks=checkpoint_callbacks(), **options
    ).history
    assert history["loss"] == pytest.approx(expected[2:], rel=1e-6)
