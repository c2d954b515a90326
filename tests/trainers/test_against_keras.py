"""A trainer gives the same results as Keras' `fit`, for any network and loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from tests.layers.reference_compare import dtype_policy
from tests.tolerances import TRAINING
from tests.trainers.small import (
    Record,
    dense_network,
    dense_trainer,
    get_weights_by_path,
    points,
    squared,
)


class TestAgainstKeras:
    """Losses, metrics and weights match Keras' `fit`."""

    @pytest.mark.parametrize(
        "units, loss, metrics, batch_size",
        [
            (1, "mse", ["mae"], 5),
            (1, lambda: keras.losses.Huber(), ["mse", "mae"], 16),
            (1, lambda: squared, [], 5),
            (
                4,
                lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                [lambda: keras.metrics.SparseCategoricalAccuracy(name="right")],
                5,
            ),
        ],
        ids=["name", "Huber", "function", "classes"],
    )
    def test_losses_and_metrics_match_keras(self, units, loss, metrics, batch_size):
        histories, weights = [], []
        x, y = points(num_classes=units if units > 1 else None)
        for make in (dense_trainer, self.keras_model):
            network = dense_network(units)
            model = make(
                keras.optimizers.Adam(0.01),
                loss() if callable(loss) else loss,
                network,
                metrics=[metric() if callable(metric) else metric for metric in metrics],
            )
            history = model.fit(
                x,
                y,
                batch_size=batch_size,
                epochs=3,
                shuffle=False,
                verbose=0,
                validation_data=points(8, units if units > 1 else None, seed=1),
            )
            histories.append(history.history)
            weights.append(get_weights_by_path(network).values())
        results, expected = histories
        for name, values in expected.items():
            np.testing.assert_allclose(results[name], values, TRAINING, err_msg=name)
        extra_names = {
            "step_loss",
            "gradient_norm",
            "learning_rate",
            "tokens_per_second",
            "mfu",
            "input_wait",
        }
        assert set(results) - set(expected) <= extra_names
        for actual, expected_value in zip(*weights, strict=True):
            np.testing.assert_allclose(actual, expected_value, TRAINING, atol=TRAINING)

    @staticmethod
    def keras_model(optimizer, loss, network, **options):
        network.compile(optimizer, loss, **options)
        return network

    def test_sample_weights_match_keras(self):
        """The mean is divided by the sum of the weights."""
        x, y = points(num_classes=4)
        sample_weight = np.linspace(0.0, 3.0, 16).astype("float32")
        results = []
        for make in (dense_trainer, self.keras_model):
            network = dense_network(4)
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
            right = [keras.metrics.SparseCategoricalAccuracy(name="right")]
            model = make(keras.optimizers.SGD(0.5), loss, network, weighted_metrics=right)
            options = dict(sample_weight=sample_weight, batch_size=16)
            history = model.fit(x, y, epochs=3, shuffle=False, verbose=0, **options).history
            scores = model.evaluate(x, y, verbose=0, return_dict=True, **options)
            results.append((history, scores, get_weights_by_path(network).values()))
        (history, scores, weights), expected = results
        for name in ("loss", "right"):
            np.testing.assert_allclose(history[name], expected[0][name], TRAINING, err_msg=name)
            assert scores[name] == pytest.approx(expected[1][name], TRAINING)
        for actual, expected_value in zip(weights, expected[2], strict=True):
            np.testing.assert_allclose(actual, expected_value, TRAINING, atol=TRAINING)

    def test_positional_arguments_have_keras_order(self):
        """Arguments of `compile`, `fit`, `evaluate` and `predict` have Keras' order."""
        x, y = points()
        results = []
        for make in (Trainer, lambda network: network):
            model = make(dense_network())
            model.compile("sgd", "mse", 0.5, ["mae"])
            history = model.fit(x, y, 5, 2, 0, None, 0.25, None, False).history
            scores = model.evaluate(x, y, 5, 0)
            results.append(
                [*history["loss"], *history["val_mae"], *scores[:1], model.predict(x, 5, 0)]
            )
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_allclose(actual, expected, TRAINING)

    def test_regularizers_match_keras(self):
        x, y = points()
        weights = []
        for make in (dense_trainer, self.keras_model):
            network = dense_network(kernel_regularizer=keras.regularizers.L2(0.5))
            model = make(keras.optimizers.SGD(0.1), "mse", network)
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            weights.append(get_weights_by_path(network).values())
        for actual, expected_value in zip(*weights, strict=True):
            np.testing.assert_allclose(actual, expected_value, TRAINING, atol=TRAINING)

    def test_unbuilt_network_is_built_from_the_data(self):
        x, y = points()
        for data in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)).batch(8),)):
            network = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
            history = dense_trainer(network=network).fit(*data, verbose=0, epochs=2).history
            assert history["loss"][1] < history["loss"][0]

    def test_pydatasets_and_generators_match_arrays(self):
        """A `PyDataset` or a generator trains a built network and builds an unbuilt network."""
        x, y = points()

        class Halves(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                part = slice(8 * index, 8 * index + 8)
                return x[part], y[part]

        def halves():
            while True:
                yield from (Halves()[index] for index in range(2))

        expected = dense_trainer().fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        for data, options in ((Halves(), {}), (halves(), {"steps_per_epoch": 2})):
            options |= {"shuffle": False, "verbose": 0}
            history = dense_trainer().fit(data, **options).history
            assert history["loss"] == pytest.approx(expected["loss"], TRAINING)
        for data, options in ((Halves(), {}), (halves(), {"steps_per_epoch": 2})):
            unbuilt = dense_trainer(network=keras.Sequential([keras.layers.Dense(1)]))
            assert len(unbuilt.fit(data, epochs=2, verbose=0, **options).epoch) == 2

    def test_train_on_batch_matches_fit(self):
        x, y = points()
        trainer, by_fit = dense_trainer(), dense_trainer()
        parts = (slice(0, 8), slice(8, 16))
        logs = [trainer.train_on_batch(x[part], y[part], return_dict=True) for part in parts]
        record = Record()
        by_fit.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
        assert [float(log["step_loss"]) for log in logs] == pytest.approx(record["step_loss"])
        for actual, expected_value in zip(trainer.get_weights(), by_fit.get_weights(), strict=True):
            np.testing.assert_allclose(actual, expected_value, TRAINING)


def classifier(kind):
    """Return a network with one output, or with two outputs in a list or a dict."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    a, b = (keras.layers.Dense(3, "softmax", name=name)(inputs) for name in "ab")
    return keras.Model(inputs, {"one": a, "list": [a, b], "dict": {"a": a, "b": b}}[kind])


@pytest.mark.parametrize(
    "kind, metrics, weighted",
    [
        ("one", None, None),
        ("one", ["accuracy", "sparse_categorical_crossentropy"], ["accuracy"]),
        ("list", [["accuracy"], ["accuracy"]], None),
        ("list", {"b": ["accuracy"], "a": ["sparse_top_k_categorical_accuracy"]}, None),
        ("dict", {"b": ["accuracy"], "a": ["accuracy"]}, {"a": ["accuracy"]}),
    ],
)
def test_returned_lists_and_metric_names_match_keras(kind, metrics, weighted):
    """`evaluate`, `train_on_batch` and `test_on_batch` return values in Keras' order."""
    x, labels = points(num_classes=3)
    y = {"one": labels, "list": [labels, labels], "dict": {"a": labels, "b": labels}}[kind]
    results = []
    for wrap in (Trainer, lambda network: network):
        model, loss = wrap(classifier(kind)), "sparse_categorical_crossentropy"
        loss = {"one": loss, "list": [loss] * 2, "dict": {"a": loss, "b": loss}}[kind]
        options = {"metrics": metrics, "weighted_metrics": weighted, "run_eagerly": True}
        model.compile("sgd", loss, **options)
        lists = model.train_on_batch(x, y), model.test_on_batch(x, y), model.evaluate(x, y)
        names = model.metrics_names, sorted(model.evaluate(x, y, return_dict=True))
        results.append((lists, names))
    np.testing.assert_allclose(results[0][0], results[1][0], TRAINING)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "kind, outputs_with_labels", [("list", "ab"), ("dict", "ab"), ("dict", "b")]
)
def test_loss_on_one_of_two_outputs_matches_keras(kind, outputs_with_labels):
    """A warning names the weights of the other output, which do not change."""
    x, labels = points(num_classes=3)
    y = {name: labels if name == "b" else labels[::-1] for name in outputs_with_labels}
    results = []
    for wrap in (Trainer, lambda network: network):
        model = wrap(classifier(kind))
        loss = {"a": None, "b": keras.losses.SparseCategoricalCrossentropy()}
        if kind == "list":
            loss, y = list(loss.values()), [labels[::-1], labels]
        model.compile(keras.optimizers.Adam(0.1), loss, run_eagerly=True)
        with pytest.warns(UserWarning, match="a/kernel.*loss"):
            losses = model.fit(x, y, epochs=2, verbose=0, batch_size=8, shuffle=False)
        results.append([losses.history["loss"], *model.get_weights()])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, TRAINING)
    trainer = Trainer(classifier(kind))
    loss = [None, CrossEntropyLoss()] if kind == "list" else {"a": None, "b": CrossEntropyLoss()}
    trainer.compile("sgd", loss, run_eagerly=True)
    if kind == "dict":  # Labels without a name belong to the only loss.
        with pytest.warns(UserWarning, match="a/kernel"):
            assert trainer.fit(x, labels, verbose=0).history["loss"][0] > 0.1
        trainer = Trainer(classifier(kind))
        trainer.compile("sgd", loss, run_eagerly=True)
    best = classifier(kind).predict(x, verbose=0)["b" if kind == "dict" else 1].argmax(-1)
    assert trainer.evaluate(x, y, verbose=0)[1] == pytest.approx((best == labels).mean())


class FarFromOne(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x - 1)))
        return x


def test_layer_losses_without_a_compiled_loss():
    """Layers add all losses. There are no targets."""
    x, results = points()[0], []
    for wrap in (Trainer, lambda network: network):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        model = wrap(keras.Model(inputs, FarFromOne()(keras.layers.Dense(2)(inputs))))
        model.compile(keras.optimizers.Adam(0.1), run_eagerly=True)
        options = {"verbose": 0, "batch_size": 8, "shuffle": False, "validation_data": (x,)}
        history = model.fit(x, epochs=2, **options).history
        results.append([history["loss"], history["val_loss"], [model.evaluate(x, verbose=0)]])
    np.testing.assert_allclose(*map(np.concatenate, results), TRAINING)


def test_missing_loss_raises_an_error():
    trainer = Trainer(dense_network())
    trainer.compile("sgd", run_eagerly=True)
    with pytest.raises(ValueError, match="has no loss. Pass a loss to `compile`"):
        trainer.fit(*points(), verbose=0)


def test_accuracy_is_returned_by_default():
    x, y = points(num_classes=4)
    for metrics, names in (
        (None, ["loss", "accuracy"]),
        (["accuracy"], ["loss", "compile_metrics"]),
    ):
        trainer = Trainer(dense_network(4))
        trainer.compile("sgd", CrossEntropyLoss(), metrics=metrics, run_eagerly=True)
        assert len(trainer.train_on_batch(x, y)) == len(trainer.evaluate(x, y, verbose=0)) == 2
        assert trainer.metrics_names == names
        assert {"loss", "accuracy"} == {*trainer.evaluate(x, y, verbose=0, return_dict=True)}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_every_precision_trains_with_and_without_xla(policy, jit_compile):
    keras.utils.set_random_seed(0)
    x, y = points()
    with dtype_policy(policy):
        trainer = dense_trainer(keras.optimizers.Adam(0.05), jit_compile=jit_compile)
    scales_loss = isinstance(trainer.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales_loss == (policy == "mixed_float16")
    history = trainer.fit(x, y, batch_size=8, epochs=16, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert np.isfinite(history["gradient_norm"][-1])  # float16 may skip the first steps.


def test_float16_overflow_skips_the_step():
    """The scale is halved, no weight changes, and training continues."""
    x, y = points(24)
    x[8:16] *= 1e5  # Too large for float16.
    with dtype_policy("mixed_float16"):
        network = dense_network(activation="linear")
    trainer, record = dense_trainer(keras.optimizers.Adam(0.01), network=network), Record()
    scale = float(trainer.optimizer.scale_loss(1.0))
    assert scale > 1.0
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[record])
    assert not np.isfinite(record["gradient_norm"][1])
    for before, after in zip(record.weights[0], record.weights[1], strict=True):
        np.testing.assert_array_equal(after, before)
    assert any((a != b).any() for a, b in zip(record.weights[1], record.weights[2]))
    assert all(np.isfinite(weight).all() for weight in record.weights[2])
    assert np.isfinite(record["gradient_norm"][2])
    assert float(trainer.optimizer.scale_loss(1.0)) == scale / 2


@pytest.mark.parametrize("policy, scale", [("mixed_float16", 2.0**24), ("float32", 1e30)])
def test_skipped_steps_count_in_the_mean_loss(policy, scale):
    """The logs also count skipped steps. No step is skipped in float32, even with a huge scale."""
    x, y = points()
    results = []
    for make in (TestAgainstKeras.keras_model, dense_trainer):
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), scale)
        with dtype_policy(policy):
            network = dense_network()
        model = make(optimizer, "mse", network, auto_scale_loss=False)
        results.append(model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history)
    expected, results = results
    np.testing.assert_allclose(results["loss"], expected["loss"], TRAINING)
    skips = policy == "mixed_float16"
    assert (expected["loss"][0] == expected["loss"][1]) == skips
    assert results["skipped_steps"][:2] == ([2, 4] if skips else [0, 0])
