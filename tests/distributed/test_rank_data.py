"""Data ranks with the wrong data stop with an error that names the ranks and the step."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from tests.shared_runs import on_ranks

X = np.random.default_rng(0).standard_normal((96, 3)).astype("float32")
Y = X[:, :1] ** 2
DIFFERENT = "Rank 0 and rank 1 have different batches in step {}"
EQUAL = "have had the same rows"


def trainer(**options):
    result = Trainer(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    result.compile("sgd", "mse", **options)
    return result


def fit(*data, log_every=1, **options):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, **options}
    return trainer(log_every=log_every).fit(*data, **options)


def changed(array, row):
    """Return a copy of the array that differs on rank 1 in one row."""
    array = array.copy()
    array[row] += job.rank()
    return array


def dataset(x, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


class ShufflesWithoutSeed(keras.utils.PyDataset):
    """Dataset that each rank shuffles differently after an epoch."""

    def __init__(self):
        super().__init__()
        self._order = np.arange(96)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        rows = self._order[16 * i : 16 * (i + 1)]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        # Keras also calls this method before the first epoch.
        self._epochs = getattr(self, "_epochs", -1) + 1
        if self._epochs:
            self._order = np.random.default_rng(job.rank()).permutation(96)


def assert_raises(message, call, *args, **kwargs):
    with pytest.raises(ValueError, match=message):
        call(*args, **kwargs)


@on_ranks("dp2@2x1")
def test_each_step_of_training_is_compared():
    weight = np.ones(96, "float32")
    assert_raises(DIFFERENT.format(3), fit, dataset(changed(X, 40)))
    assert_raises(DIFFERENT.format(6), fit, X, Y, sample_weight=changed(weight, 90))


@pytest.mark.long
@on_ranks("dp2@2x1")
def test_every_kind_of_training_data_is_compared():
    assert_raises(DIFFERENT.format(5), fit, changed(X, 70), Y)
    assert_raises(DIFFERENT.format(1), fit, X, changed(Y, 0))
    assert_raises(DIFFERENT.format(2), fit, dataset(X, changed(Y, 17)))
    batches = [(X[:16], Y[:16]), (changed(X, 16)[16:32], Y[16:32])]
    assert_raises(
        DIFFERENT.format(2), fit, (batch for batch in itertools.cycle(batches)), steps_per_epoch=2
    )
    assert_raises(DIFFERENT.format(7), fit, ShufflesWithoutSeed(), epochs=2)
    texts = np.array([f"text {i + (i == 20) * job.rank()}" for i in range(96)])
    ignores = keras.Input((), dtype="string")
    model = Trainer(
        keras.Model([ignores, inputs := keras.Input((3,))], keras.layers.Dense(1)(inputs))
    )
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices(((texts, X), Y)).batch(16)
    assert_raises(DIFFERENT.format(2), model.fit, data, verbose=0)


@on_ranks("dp2@2x1")
def test_steps_between_reads_of_the_logs_are_compared():
    assert_raises(DIFFERENT.format(3), fit, changed(X, 40), Y, log_every=5)
    assert_raises(DIFFERENT.format(6), fit, changed(X, 95), Y, log_every=100)
    model = trainer(steps_per_execution=3)
    assert_raises(DIFFERENT.format(5), model.fit, dataset(changed(X, 64)), verbose=0)


@on_ranks("dp2@2x1")
def test_validation_evaluation_and_prediction_are_compared():
    for validation in ((X, changed(Y, 50)), dataset(changed(X, 50))):
        assert_raises(DIFFERENT.format(4), fit, X, Y, validation_data=validation)
    assert_raises(
        DIFFERENT.format(2), trainer().evaluate, changed(X, 31), Y, batch_size=16, verbose=0
    )
    assert_raises("different batches", trainer().predict, changed(X, 95), batch_size=16, verbose=0)
    assert_raises("different batches", trainer().predict_on_batch, changed(X, 0))
    assert_raises(DIFFERENT.format(1), trainer().test_on_batch, X, changed(Y, 95))


@on_ranks("dp2@2x1")
def test_each_call_of_train_on_batch_is_compared():
    model = trainer()
    model.train_on_batch(X, Y)
    assert_raises(DIFFERENT.format(2), model.train_on_batch, X, changed(Y, 95))
    assert_raises(EQUAL, model.train_on_batch, X, Y, shard=False)


@on_ranks("dp2@2x1")
def test_same_local_rows_in_another_order_raise_an_error():
    order = np.random.default_rng(job.rank()).permutation(96)
    assert_raises(EQUAL + " up to step 6", fit, X[order], Y[order], shard=False)
    assert_raises(EQUAL + " up to step 1", fit, X, Y, shard=False)
    local_x = np.concatenate([X[:16] + job.rank(), X[16:]])
    assert len(fit(local_x, Y, shard=False).history["loss"]) == 1  # Most batches differ.


@on_ranks("dp2mp2@4x1")
def test_batches_of_mesh_replicas_are_compared():
    assert_raises(
        "have different batches in step 3", fit, X + (job.data_shard()[0] == 1) * (X == X[40]), Y
    )


@on_ranks("dp2pp2m2@4x1")
def test_batches_of_pipeline_replicas_are_compared():
    layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
    model = Trainer(keras.Sequential([keras.Input((3,)), *layers]))
    model.compile("sgd", "mse")
    other = X + (job.data_shard()[0] == 1) * (X == X[40])
    assert_raises(
        "have different batches in step 3", model.fit, other, Y, 16, verbose=0, shuffle=False
    )


@on_ranks("dp2@2x1")
def test_r2_score_covers_the_rows_of_all_ranks():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trained = Trainer(model)
    trained.compile("sgd", "mse", metrics=[keras.metrics.R2Score()])
    actual = trained.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    model.compile(loss="mse", metrics=[keras.metrics.R2Score()])
    expected = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    assert actual["r2_score"] == pytest.approx(expected["r2_score"], rel=1e-5)
    assert np.isfinite(trained.fit(X, Y, verbose=0).history["r2_score"][0])
