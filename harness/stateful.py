"""Networks with layer states, layer metrics, added losses and masks."""

import functools
import warnings

import keras
import numpy as np
from keras import ops
from keras.layers import Dense

from dtransformer.trainers import Trainer
from harness.layouts import ALONE

ROWS, WIDTH, VOCAB, CLASSES = 16, 4, 8, 3
rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (ROWS, WIDTH)).astype("int32")
for row in range(ROWS):
    IDS[row, WIDTH - row % 3 :] = 0  # masked
TAGS = rng.integers(0, CLASSES, (ROWS, WIDTH)).astype("int32")


class Seen(keras.layers.Layer):
    """Layer with metrics of its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen, self.rows = keras.metrics.Mean(name="seen"), keras.metrics.Sum(name="rows")
        self.supports_masking = True

    def call(self, x):
        self.seen.update_state(ops.abs(x))
        self.rows.update_state(ops.ones([ops.shape(x)[0]]))
        return x


class Counts(keras.layers.Layer):
    """Layer that counts its steps and rows and keeps a moving mean."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.steps = self.add_weight((), name="steps", dtype="int32", **options)
        self.rows = self.add_weight((), name="rows", **options)
        self.mean = self.add_weight((shape[-1],), name="mean", **options)

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, [0, 1]))
        return x


class Adds(keras.layers.Layer):
    """Layer that adds a mean over the rows, or its square, to the loss."""

    def __init__(self, power, **kwargs):
        super().__init__(**kwargs)
        self.power = power

    def call(self, x):
        self.add_loss(ops.mean((10 * x) ** 2) ** self.power)
        return x


def network(inner=list):
    """Return a tagger with a masking embedding and the layers that `inner` creates."""
    keras.backend.clear_session()  # Layer names restart at zero.
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,), dtype="int32")
    x = keras.layers.ReversibleEmbedding(VOCAB, 6, mask_zero=True)(inputs)
    for layer in (Dense(6, "tanh"), *inner(), Dense(6, "tanh")):
        x = layer(x)
    return keras.Model(inputs, Dense(CLASSES)(x))


def numbers(model, loss=None, metrics=(), weighted_metrics=(), epochs=2, batch_size=8):
    """Return the history of `fit`, the result of `evaluate`, and the layers' states."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"metrics": [*metrics], "weighted_metrics": [*weighted_metrics]}
    model.compile(keras.optimizers.SGD(0.5), loss, **options)
    data = {"x": IDS, "y": TAGS, "batch_size": batch_size}
    history = model.fit(
        **data, epochs=epochs, shuffle=False, verbose=0, validation_data=(IDS, TAGS)
    ).history
    scores = model.evaluate(**data, verbose=0, return_dict=True)
    states = [
        np.asarray(variable.numpy(), "float64")
        for layer in getattr(model, "network", model).layers
        for variable in layer.non_trainable_variables
        if variable.dtype != "uint32"  # Skip the states of seed generators.
    ]
    return {"history": history, "evaluation": scores, "states": states}


def assert_as_in_keras(result, expected, rtol):
    for kind in ("history", "evaluation"):
        for name, value in expected[kind].items():
            np.testing.assert_allclose(result[kind][name], value, rtol, err_msg=name)
    for state, expected_state in zip(result["states"], expected["states"], strict=True):
        np.testing.assert_allclose(state, expected_state, rtol, atol=rtol)


def masked_metrics():
    """Return compile arguments: a metric by name, by class and by function, and a weighted one."""
    entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    right = keras.metrics.SparseCategoricalAccuracy(name="right")
    return {"metrics": ["accuracy", entropy, top], "weighted_metrics": [right]}


def top(labels, outputs):
    """Metric: the largest output at each position."""
    return ops.max(outputs, -1)


def masked_mean(labels, outputs):
    """Loss: the mean over nonzero labels, a ratio of sums."""
    counts = ops.cast(labels > 0, "float32")
    values = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
    return ops.sum(values * counts) / ops.sum(counts)


class Unmasked(keras.layers.Layer):
    """Layer that removes masks, because a mask cannot weight a scalar loss."""

    def call(self, x):
        return x + 0.0


def norm_of_the_spectrum():
    return [keras.layers.SpectralNormalization(Dense(6))]


# Rows of benchmarks/keras_values.py: layers, arguments of `numbers`, and the compared value.
KINDS = {
    "a mask that a layer leaves on its result": (list, {}, "loss"),
    "the mask in a compiled metric": (list, masked_metrics, "accuracy"),
    "the mask in `weighted_metrics`": (list, masked_metrics, "right"),
    "a metric that a layer owns": (lambda: [Seen()], {}, "seen"),
    "states that a layer sets": (lambda: [Counts()], {}, "states"),
    "`SpectralNormalization`": (norm_of_the_spectrum, {}, "states"),
    "an activity regularizer": (
        lambda: [Unmasked(), Dense(6, activity_regularizer="l2")],
        {},
        "loss",
    ),
    "`add_loss` of a mean": (lambda: [Unmasked(), Adds(1)], {}, "loss"),
    "the same beside a masked loss": (lambda: [Adds(1)], {}, "loss"),
    "`add_loss` of a product of means": (lambda: [Unmasked(), Adds(2)], {}, "loss"),
    "a loss that is a ratio of sums": (lambda: [Unmasked()], {"loss": masked_mean}, "loss"),
    "`BatchNormalization`": (lambda: [keras.layers.BatchNormalization()], {}, "states"),
}


def evaluate_kind(kind, layout):
    """Return the value of a kind under a layout. A single process uses Keras' `fit`."""
    inner, options, name = KINDS[kind]
    model = network(inner)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model = model if layout == ALONE else Trainer(model)
            results = numbers(model, **(options() if callable(options) else options))
        except ValueError as error:
            return {"refused": str(error)}
    has_warned = any("differ from Keras'" in str(warning.message) for warning in warned)
    if name == "states":
        value = float(sum(np.abs(state).sum() for state in results["states"]))
    else:
        value = float(results["history"][name][-1])
    return {"value": value, "is_told": has_warned}


TASKS = {str(i): functools.partial(evaluate_kind, kind) for i, kind in enumerate(KINDS)}
