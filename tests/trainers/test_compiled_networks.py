"""A compiled network, such as a KerasHub task, keeps its loss and metrics in a trainer."""

import warnings

import keras
import numpy as np
import pytest

from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from tests.shared_runs import on_ranks

ROWS, FEATURES, CLASSES = 24, 6, 3
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, FEATURES)).astype("float32")
Y = rng.integers(0, CLASSES, ROWS)


class TaskModel(keras.Model):
    """A classifier with a default `compile` and with loops that preprocess the data."""

    def __init__(self):
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        super().__init__(inputs, keras.layers.Dense(CLASSES)(hidden))
        self.compile()

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **options):
        if optimizer == "auto":
            optimizer = keras.optimizers.SGD(0.1)
        if loss == "auto":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if metrics == "auto":
            metrics = [keras.metrics.SparseCategoricalAccuracy()]
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics, **options)

    @staticmethod
    def preprocess(x):
        return 3 * x - 1

    def fit(self, x, y, **options):
        return super().fit(self.preprocess(x), y, **options)

    def evaluate(self, x, y, **options):
        return super().evaluate(self.preprocess(x), y, **options)

    def predict(self, x, **options):
        return super().predict(self.preprocess(x), **options)


def task():
    keras.utils.set_random_seed(0)
    return TaskModel()


def fit(model, x):
    return model.fit(x, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history


def check_history(**options):
    expected = fit(task(), X)
    network = task()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1), **options)
    history = fit(trainer, TaskModel.preprocess(X))
    assert expected["sparse_categorical_accuracy"][-1] > 0.4
    for name in ("sparse_categorical_accuracy", "loss"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    return [str(warning.message) for warning in caught]


def test_compiled_loss_and_accuracy_match_keras_fit():
    check_history()


def test_compiled_accuracy_is_kept_if_the_trainer_has_a_loss():
    check_history(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def test_one_warning_names_all_overridden_loops():
    (text,) = check_history()
    assert text.startswith("TaskModel overrides fit, evaluate, predict, which the trainer does not")


@on_ranks("dp2@2x1")
def test_two_ranks_keep_the_accuracy_and_only_rank_0_warns():
    assert len(check_history()) == (1 if job.is_chief() else 0)


@pytest.mark.parametrize("metrics", [[], ["accuracy"]])
def test_trainer_metrics_replace_compiled_metrics(metrics):
    trainer = Trainer(task())
    trainer.compile("sgd", metrics=metrics)
    history = fit(trainer, X)
    assert "sparse_categorical_accuracy" not in history
    assert ("accuracy" in history) == bool(metrics)
