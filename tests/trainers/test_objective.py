"""Losses match Keras for every reduction, and losses of micro-batches sum to the batch loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from dtransformer.trainers.objective import Objective
from tests.tolerances import TRAINING

ROWS, WIDTH, CLASSES = 11, 5, 4
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, WIDTH, 3)).astype("float32")
X[::3, 2:] = 0  # Masked positions.
CLASS = rng.integers(0, CLASSES, (ROWS, WIDTH))
ONE_HOT, WEIGHT = np.eye(CLASSES, dtype="float32")[CLASS], rng.random((ROWS, WIDTH), "float32")
VALUE = rng.standard_normal((ROWS, WIDTH, 1)).astype("float32")


def classes(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def cubed(labels, outputs):
    return tf.reduce_mean(tf.abs(labels - outputs) ** 3, -1)


def one_value(labels, outputs):
    return tf.reduce_mean(tf.abs(labels - outputs) ** 3)


# A function that creates the loss, and labels.
LOSSES = {
    "mse": (lambda: "mse", ONE_HOT),
    "function": (lambda: cubed, ONE_HOT),
    "one value": (lambda: one_value, ONE_HOT),
    "smoothing": (lambda: keras.losses.CategoricalCrossentropy(True, 0.1), ONE_HOT),
    "cosine": (lambda: keras.losses.CosineSimilarity(), ONE_HOT),
    "classes": (classes, CLASS),
    "sum": (lambda: classes(reduction="sum"), CLASS),
    "over weights": (lambda: classes(reduction="mean_with_sample_weight"), CLASS),
    "a class ignored": (lambda: classes(ignore_class=1), CLASS),
}


def network(masks=False, activation=None):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH, 3))
    x = keras.layers.Masking()(inputs) if masks else inputs
    regularizer = keras.regularizers.L2(0.1)
    x = keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer)(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, activation)(x))


def fit(model, loss, labels, weights, **options):
    """Return the history of `fit` and the weights after training."""
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    data = {"x": X, "y": labels, "sample_weight": weights, "batch_size": 4, "shuffle": False}
    history = model.fit(**data, epochs=2, verbose=0, validation_data=(X, labels)).history
    return history, getattr(model, "network", model).get_weights()


def assert_same(actual, expected, names=None):
    for name in names or expected[0]:
        np.testing.assert_allclose(actual[0][name], expected[0][name], TRAINING, err_msg=name)
    for actual_value, expected_value in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(actual_value, expected_value, TRAINING, atol=TRAINING)


@pytest.mark.parametrize("masks, weights", [(False, None), (True, WEIGHT)], ids=["", "weighted"])
@pytest.mark.parametrize("name", LOSSES)
def test_history_and_weights_match_keras(name, masks, weights):
    make, labels = LOSSES[name]
    actual = fit(Trainer(network(masks)), make(), labels, weights)
    assert_same(actual, fit(network(masks), make(), labels, weights))


@pytest.mark.parametrize("weights", [None, WEIGHT], ids=["", "weights"])
@pytest.mark.parametrize("masks", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_micro_batches_sum_to_the_batch_loss(name, masks, weights):
    """The parts of the batch have different sizes."""
    make, labels = LOSSES[name]
    model = keras.Sequential([keras.layers.Identity()])
    model.compile("sgd", make())
    outputs = network(masks)(X)
    expected = model.compute_loss(X, labels, outputs, weights)
    objective, parts = Objective(make()), [slice(0, 2), slice(2, 3), slice(3, ROWS)]
    select_rows = lambda x, part: None if x is None else tf.convert_to_tensor(x[part])
    batches = [tuple(select_rows(x, part) for x in (X, labels, weights)) for part in parts]
    counts = sum(objective.counts(*batch) for batch in batches)
    totals = {}
    for part, (_, part_labels, part_weights) in zip(parts, batches):
        part_outputs = outputs[part]
        if masks:
            part_outputs._keras_mask = outputs._keras_mask[part]
        arguments = part_outputs, part_labels, part_weights, counts
        if name == "one value" and (masks or weights is not None):
            with pytest.raises(ValueError, match="one_value.*each row"):
                objective.sums(*arguments, is_full_batch=False)
            return
        sums = objective.sums(*arguments, is_full_batch=False)
        totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
    loss = totals["loss"] / totals.get("normalizer_ratio", 1.0)
    assert float(loss) == pytest.approx(float(expected), TRAINING)


def test_crossentropy_by_name_matches_keras():
    actual = [
        fit(make(network(activation="softmax")), "crossentropy", CLASS, None)
        for make in (Trainer, lambda network: network)
    ]
    assert_same(*actual)


class TestSeveralOutputs:
    def network(self):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((WIDTH, 3))
        x = keras.layers.Dense(8, activation="tanh")(inputs)
        names = {"tag": keras.layers.Dense(CLASSES, name="tag")(x)}
        return keras.Model(inputs, {**names, "value": keras.layers.Dense(1, name="value")(x)})

    LABELS = {"tag": CLASS, "value": VALUE}

    @pytest.mark.parametrize(
        "weights, loss_weights",
        [(None, None), ({"tag": WEIGHT, "value": WEIGHT[:, :1]}, {"tag": 1.0, "value": 0.3})],
    )
    def test_history_and_weights_match_keras(self, weights, loss_weights):
        actual = [
            fit(
                make(self.network()),
                {"tag": classes(), "value": "mse"},
                self.LABELS,
                weights,
                loss_weights=loss_weights,
                metrics={"tag": ["accuracy"], "value": ["mae"]},
            )
            for make in (Trainer, lambda network: network)
        ]
        # In the logged losses of outputs, Keras weights the smaller last batch as one row. In all
        # other values it weights a batch by its rows.
        output_losses = {"tag_loss", "val_tag_loss", "value_loss", "val_value_loss"}
        assert output_losses < set(actual[0][0])
        assert_same(*actual, names=set(actual[1][0]) - output_losses)

    def test_one_loss_for_all_outputs(self):
        inputs = keras.Input((WIDTH, 3))
        model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
        weights = model.get_weights()
        actual = []
        for make in (Trainer, lambda network: network):
            model.set_weights(weights)
            actual.append(fit(make(model), "mse", [VALUE, 2 * VALUE], None))
        assert_same(*actual, names=["loss"])


@pytest.mark.parametrize("reduction", ["none", None])
def test_reductions_without_a_scalar_raise_an_error(reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction, name="the_loss")
    with pytest.raises(ValueError, match=f"the_loss.*{reduction}.*sum_over_batch_size"):
        Objective(loss)


def test_loss_that_overrides_call_raises_an_error():
    class CustomLoss(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return 0.0

    with pytest.raises(ValueError, match="CustomLoss.*__call__"):
        Objective(CustomLoss())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_outputs_are_compared_in_float32(dtype):
    """The square of 1,000 is too large for float16."""
    objective, outputs, labels = Objective("mse"), tf.constant([[1000.0]], dtype), [[0.0]]
    labels = tf.constant(labels)
    counts = objective.counts(outputs, labels, None)
    assert float(objective.sums(outputs, labels, None, counts, True)["loss"]) == 1e6


def test_counts_of_tokens_and_rows():
    """The mean of a token loss over an epoch is divided by the number of tokens."""
    objective = Objective(CrossEntropyLoss(ignore_id=0))
    assert objective.is_token_loss and not Objective("mse").is_token_loss
    counts = objective.counts(tf.zeros((2, 3)), tf.constant([[1, 0, 2], [0, 0, 0]]), None)
    np.testing.assert_array_equal(counts, [2, 6, -6, 2])
