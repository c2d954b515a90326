"""Promise: Keras' shuffling follows from the job's seed, the fit and the epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.trainers import ModelCheckpoint
from tests.trainers.small import dense_trainer, points

ROWS = 12


class Seen(keras.callbacks.Callback):
    """Records the row numbers of each batch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])

    def on_train_batch_end(self, batch, logs=None):
        inputs, _ = self.model._program.runner.logs.batch
        self.epochs[-1].append([int(x) for x in inputs[:, 0]])


def orders(trainer=None, **options):
    """Return for each epoch the list of the batches' rows."""
    rows, seen = np.tile(np.arange(ROWS)[:, None], (1, 3)).astype("float32"), Seen()
    options = {"batch_size": 4, "epochs": 3, "verbose": 0, **options}
    (trainer or dense_trainer()).fit(rows, rows[:, :1], callbacks=[seen], **options)
    return seen.epochs


def test_every_epoch_and_fit_has_a_different_order():
    trainer = dense_trainer()
    epochs = [*orders(trainer), *orders(trainer)]
    assert len({str(epoch) for epoch in epochs}) == 6
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(ROWS))


def test_order_does_not_depend_on_the_process():
    expected = orders()
    keras.utils.set_random_seed(5)
    assert orders() == expected
    assert orders(initial_epoch=1) == expected[1:]
    assert orders(shuffle=False) == 3 * [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]


def test_rows_are_shuffled_within_batches():
    for epoch in orders(shuffle="batch"):
        assert [sorted(batch) for batch in epoch] == orders(shuffle=False)[0]
        assert [sorted(batch) for batch in epoch] != epoch


def test_sparse_arrays_are_shuffled_like_dense_ones():
    x, y = points(ROWS)
    expected = dense_trainer().fit(x, y, 4, verbose=0).history["loss"]
    found = dense_trainer(network=_of_sparse()).fit(tf.sparse.from_dense(x), y, 4, verbose=0)
    assert found.history["loss"] == pytest.approx(expected)


def _of_sparse():
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
    saving = lambda: [ModelCheckpoint(tmp_path)]
    dense_trainer().fit(x, y, epochs=2, callbacks=saving(), **options)
    resumed = dense_trainer()
    history = resumed.fit(x, y, epochs=4, resume=True, callbacks=saving(), **options).history
    assert history["loss"] == pytest.approx(expected[2:], rel=1e-6)
