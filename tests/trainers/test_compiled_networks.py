"""A compiled network, such as a KerasHub task, keeps its optimizer, loss and metrics."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from dtransformer.trainers.sample_preprocessing import Samples, preprocess_data
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


def test_the_optimizer_is_the_networks_own():
    expected = fit(task(), X)
    trainer = Trainer(task())
    trainer.compile()
    assert trainer.optimizer is trainer.network.optimizer
    history = fit(trainer, TaskModel.preprocess(X))
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_a_used_optimizer_starts_with_new_states():
    network = task()
    fit(network, X)
    assert int(network.optimizer.iterations) == 9
    trainer = Trainer(network)
    trainer.compile()
    assert isinstance(trainer.optimizer, keras.optimizers.SGD)
    assert int(trainer.optimizer.iterations) == 0
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.1)


def test_a_network_without_an_optimizer_gets_adamw():
    trainer = Trainer(keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)]))
    trainer.compile(loss="mse")
    assert isinstance(trainer.optimizer, keras.optimizers.AdamW)


class PreprocessingModel(TaskModel):
    """A classifier that preprocesses samples, by the protocol of KerasHub's tasks."""

    def __init__(self):
        super().__init__()
        self.preprocessor = TaskModel.preprocess

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return keras.utils.pack_x_y_sample_weight(self.preprocessor(x), y, sample_weight)

    fit, evaluate, predict = keras.Model.fit, keras.Model.evaluate, keras.Model.predict


def preprocessing_trainer():
    keras.utils.set_random_seed(0)
    trainer = Trainer(PreprocessingModel())
    trainer.compile()
    return trainer


ROW_WEIGHTS = np.linspace(0.5, 1.5, ROWS, dtype="float32")


def as_dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


@pytest.mark.parametrize("is_dataset", [False, True], ids=["arrays", "dataset"])
def test_the_trainer_applies_the_networks_preprocessing(is_dataset):
    network = task()
    options = {"epochs": 3, "shuffle": False, "verbose": 0}
    validation = (X[:16], Y[:16])
    expected = keras.Model.fit(
        network,
        TaskModel.preprocess(X),
        Y,
        batch_size=8,
        sample_weight=ROW_WEIGHTS,
        validation_data=(TaskModel.preprocess(X[:16]), Y[:16]),
        **options,
    ).history
    trainer = preprocessing_trainer()
    if is_dataset:
        data = as_dataset(X, Y, ROW_WEIGHTS)
        history = trainer.fit(data, validation_data=as_dataset(*validation), **options).history
        results = trainer.evaluate(as_dataset(X, Y), verbose=0)
        outputs = trainer.predict(as_dataset(X), verbose=0)
    else:
        history = trainer.fit(
            X, Y, 8, sample_weight=ROW_WEIGHTS, validation_data=validation, **options
        ).history
        results = trainer.evaluate(X, Y, batch_size=8, verbose=0)
        outputs = trainer.predict(X, batch_size=8, verbose=0)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(results, network.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(outputs, network.predict(X, verbose=0), atol=1e-5)


def test_single_batches_are_preprocessed():
    network = task()
    trainer = preprocessing_trainer()
    raw, processed = X[:8], TaskModel.preprocess(X[:8])
    for method in ("test_on_batch", "train_on_batch"):
        network.reset_metrics()
        expected = getattr(network, method)(processed, Y[:8])
        results = getattr(trainer, method)(raw, Y[:8])
        np.testing.assert_allclose(results, expected, rtol=1e-5, err_msg=method)
    np.testing.assert_allclose(
        trainer.predict_on_batch(raw), network.predict_on_batch(processed), atol=1e-5
    )


def test_preprocessed_data_are_used_as_they_are():
    network = PreprocessingModel()
    (name,) = [symbol.name for symbol in network.inputs]
    for inputs in ({name: X}, tf.data.Dataset.from_tensors({name: X})):
        assert preprocess_data(network, Samples(inputs)).x is inputs
    network.preprocessor = None
    x, y, *_ = preprocess_data(network, Samples(X, Y))
    assert x is X and y is Y


def test_data_that_cannot_be_preprocessed_are_refused():
    batches = ((X[:8], Y[:8]) for _ in range(3))
    with pytest.raises(ValueError, match="received a generator.*`preprocessor` to `None`"):
        preprocessing_trainer().fit(batches, verbose=0)


def test_preprocessing_gives_no_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preprocessing_trainer()
    assert [str(warning.message) for warning in caught if "Model" in str(warning.message)] == []


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
