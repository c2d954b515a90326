"""Networks whose layers set states, own metrics, add losses, or leave masks on what they return."""

import keras
import numpy as np
from keras import ops

ROWS, WIDTH, VOCAB, CLASSES = 16, 4, 8, 3
rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (ROWS, WIDTH)).astype("int32")
for row in range(ROWS):
    IDS[row, WIDTH - row % 3 :] = 0  # masked
TAGS = rng.integers(0, CLASSES, (ROWS, WIDTH)).astype("int32")


class Seen(keras.layers.Layer):
    """Owns metrics of what it sees."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen, self.rows = keras.metrics.Mean(name="seen"), keras.metrics.Sum(name="rows")
        self.supports_masking = True

    def call(self, x):
        self.seen.update_state(ops.abs(x))
        self.rows.update_state(ops.ones([ops.shape(x)[0]]))
        return x


class Counts(keras.layers.Layer):
    """Keeps the number of its steps and rows, and a moving mean."""

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
    """Adds to the loss: a mean over the rows, or the square of one."""

    def __init__(self, power, **kwargs):
        super().__init__(**kwargs)
        self.power = power

    def call(self, x):
        self.add_loss(ops.mean(x * x) ** self.power)
        return x


def network(inner=list):
    """A tagger whose embedding leaves its mask by itself, with layers that `inner` makes."""
    keras.backend.clear_session()  # the names of layers
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,), dtype="int32")
    x = keras.layers.ReversibleEmbedding(VOCAB, 6, mask_zero=True)(inputs)
    for layer in (keras.layers.Dense(6, "tanh"), *inner(), keras.layers.Dense(6, "tanh")):
        x = layer(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def numbers(model, loss=None, metrics=(), weighted_metrics=(), epochs=2, batch_size=8):
    """Return the history of `fit`, what `evaluate` gives, and the states of layers."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"metrics": [*metrics], "weighted_metrics": [*weighted_metrics]}
    model.compile(keras.optimizers.SGD(0.5), loss, **options)
    data = {"x": IDS, "y": TAGS, "batch_size": batch_size}
    found = model.fit(
        **data, epochs=epochs, shuffle=False, verbose=0, validation_data=(IDS, TAGS)
    ).history
    scores = model.evaluate(**data, verbose=0, return_dict=True)
    states = [
        np.asarray(variable.numpy(), "float64")
        for layer in getattr(model, "network", model).layers
        for variable in layer.non_trainable_variables
        if variable.dtype != "uint32"  # seeds
    ]
    return {"history": found, "evaluation": scores, "states": states}


def assert_as_in_keras(found, expected, rtol):
    for kind in ("history", "evaluation"):
        for name, value in expected[kind].items():
            np.testing.assert_allclose(found[kind][name], value, rtol, err_msg=name)
    for actual, wanted in zip(found["states"], expected["states"], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol, atol=rtol)


def masked_metrics():
    """A metric's name, metrics, a function, and one that sees the weights."""
    entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    right = keras.metrics.SparseCategoricalAccuracy(name="right")
    return {"metrics": ["accuracy", entropy, top], "weighted_metrics": [right]}


def top(labels, outputs):
    """The greatest output of each position."""
    return ops.max(outputs, -1)
