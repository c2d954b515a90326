"""Promise: recompute of a Keras layer keeps its results, gradients and states."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import FeedForward
from dtransformer.parallel.pipeline_parallel import build
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.state_scope import StateScope
from dtransformer.parallel.tracing.two_passes import TwoPasses

ROWS, LENGTH, FEATURES = 4, 5, 6


def rows():
    return tf.constant(np.random.default_rng(0).normal(size=(ROWS, FEATURES)), "float32")


def results(layer):
    """Return the output and the gradients of the input and the weights, in a graph."""

    @tf.function(autograph=False)
    def compute(x):
        weights = [weight.value for weight in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            cost = tf.reduce_sum(tf.square(y))
        return y, *tape.gradient(cost, [x, *weights])

    return [value.numpy() for value in compute(rows())]


class Block(keras.layers.Layer):
    """Layer whose inner layers get `training` from the context of the call."""

    def build(self, shape):
        dtype = self.dtype_policy
        self.hidden = keras.layers.Dense(2 * FEATURES, "gelu", dtype=dtype)
        self.dropout = keras.layers.Dropout(0.5, seed=1, dtype=dtype)
        self.norm = keras.layers.BatchNormalization(momentum=0.5, dtype=dtype)
        self.projection = keras.layers.Dense(FEATURES, dtype=dtype)
        self.hidden.build(shape)
        self.norm.build((*shape[:-1], 2 * FEATURES))
        self.projection.build((*shape[:-1], 2 * FEATURES))

    def call(self, x):
        return x + self.projection(self.norm(self.dropout(self.hidden(x))))


def make_block(change=lambda layer: layer, dtype="float32", mode=None):
    keras.utils.set_random_seed(0)
    with keras.RematScope(mode=mode):
        layer = Block(dtype=dtype)
        layer.build((ROWS, FEATURES))
    return change(layer)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("mode", [None, "full"])
def test_gradients_and_states_are_unchanged(mode, dtype):
    expected_layer = make_block(dtype=dtype)
    layer = make_block(lambda x: x if mode else dtransformer.recompute(x), dtype, mode)
    expected = [results(expected_layer) for _ in range(2)]
    actual = [results(layer) for _ in range(2)]
    assert np.abs(expected[0][0] - expected[1][0]).max() > 0.1  # Each call has another mask.
    for step, expected_step in zip(actual, expected):
        for value, expected_value in zip(step, expected_step, strict=True):
            np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-5)
    for variable, expected_variable in zip(layer.variables, expected_layer.variables):
        np.testing.assert_allclose(variable, expected_variable, rtol=1e-6, err_msg=variable.path)


def num_stored(layer):
    """Return the number of tensors, without weights, that the backward pass takes."""
    layer.build((ROWS, LENGTH, FEATURES))
    weights = layer.variables

    def compute(inputs, constants, values):
        with StateScope(zip(weights, values)):
            return [layer(inputs[0], training=True)], []

    x = tf.ones((ROWS, LENGTH, FEATURES))
    values = [tf.convert_to_tensor(weight.value) for weight in weights]
    passes = TwoPasses(compute, [x], [], values, [weight.trainable for weight in weights])
    return len(passes.saved_names)


class SelfAttention(keras.layers.MultiHeadAttention):
    """Self-attention with one argument."""

    def build(self, shape):
        super().build(shape, shape)

    def call(self, x):
        return super().call(x, x, training=True)


def hub_block():
    keras_hub = pytest.importorskip("keras_hub")
    return keras_hub.layers.TransformerEncoder(2 * FEATURES, 2, dropout=0.5)


KINDS = {
    "dense": lambda: keras.layers.Dense(FEATURES, "gelu"),
    "attention": lambda: SelfAttention(2, 3, dropout=0.5),
    "subclass": Block,
    "keras_hub": hub_block,
}


@pytest.mark.parametrize("kind", KINDS)
def test_stores_only_inputs(kind):
    stored = num_stored(KINDS[kind]())
    recomputed = num_stored(dtransformer.recompute(KINDS[kind]()))
    assert recomputed <= 2 < stored


def test_dropout_has_the_same_mask_in_the_gradient():
    dropout = dtransformer.recompute(keras.layers.Dropout(0.5))
    y, gradient = results(dropout)
    np.testing.assert_allclose(gradient, 4 * y, rtol=1e-6)  # d(y²)/dx = 2y · 2, or 0.
    assert 0 < np.count_nonzero(y) < y.size


def test_several_results_and_arguments():
    class Several(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, inputs, factor=None):
            x, ids = inputs
            return {"y": self.scale * x * factor["f"], "ids": ids + 1, "none": None}

    layer = dtransformer.recompute(Several())
    x, ids, factor = rows(), tf.constant([1, 2, 3, 4]), tf.constant(3.0)
    layer.build(None)
    with tf.GradientTape() as tape:
        tape.watch([x, factor])
        outputs = layer((x, ids), factor={"f": factor}, training=True)
        cost = tf.reduce_sum(outputs["y"])
    gradients = tape.gradient(cost, [x, factor, layer.scale.value])
    np.testing.assert_array_equal(outputs["ids"], [2, 3, 4, 5])
    assert outputs["none"] is None
    np.testing.assert_allclose(gradients[0], 3 * np.ones_like(x))
    np.testing.assert_allclose(gradients[1:], [tf.reduce_sum(x), 3 * tf.reduce_sum(x)], rtol=1e-6)


@pytest.mark.parametrize("is_placed", [False, True])
def test_method_of_a_layer_is_recomputed(is_placed):
    """`keras.remat` takes methods, also of layers that a pipeline has placed."""
    num_calls = []

    class Method(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.square = keras.remat(self._square)

        def _square(self, x):
            num_calls.append(1)
            return keras.ops.square(self.scale * x)

        def call(self, x):
            return self.square(x)

    layer = Method()
    layer.build(None)
    if is_placed:
        layer.pipeline_stage = 0
    x = rows()
    with tf.GradientTape() as tape:
        cost = tf.reduce_sum(layer(x, training=True))
    gradient = tape.gradient(cost, layer.scale.value)
    np.testing.assert_allclose(gradient, 2 * tf.reduce_sum(x**2), rtol=1e-6)
    assert len(num_calls) == 2


def test_layer_on_a_stage_is_computed_twice():
    num_calls = []

    class Counts(keras.layers.Dense):
        def call(self, x):
            num_calls.append(1)
            return super().call(x)

    layer = dtransformer.recompute(Counts(FEATURES))
    layer.build((ROWS, FEATURES))
    build._make_placeable(layer)  # A pipeline does this before the first step.
    layer.pipeline_stage = 0
    x = rows()
    with tf.GradientTape() as tape:
        cost = tf.reduce_sum(layer(x, training=True))
    gradient = tape.gradient(cost, layer.kernel.value)
    np.testing.assert_allclose(gradient[:, 0], tf.reduce_sum(x, 0), rtol=1e-5)
    assert len(num_calls) == 2


def test_weights_of_other_layers_raise_an_error():
    other = keras.layers.Dense(FEATURES)
    other.build((ROWS, FEATURES))

    class Reads(keras.layers.Layer):
        def call(self, x):
            return x * other.kernel[0]

    layer = dtransformer.recompute(Reads())
    with pytest.raises(ValueError, match="not among its weights"):
        layer(rows(), training=True)
    layer(rows())  # Inference computes nothing again.


def test_model_on_several_stages_raises_an_error(monkeypatch):
    inner = keras.Sequential([keras.layers.Dense(FEATURES)], name="inner_model")
    inner.build((ROWS, FEATURES))
    dtransformer.recompute(inner)
    inner(rows(), training=True)
    inner.layers[0].pipeline_stage = 0
    monkeypatch.setattr(job, "placement", lambda: types.SimpleNamespace(num_chunks=2))
    with pytest.raises(ValueError, match="inner_model.*Recompute the layers inside"):
        inner(rows(), training=True)


def test_config_keeps_recompute():
    layer = FeedForward(8, 16)
    layer.recompute()
    copy = FeedForward.from_config(layer.get_config())
    assert copy.recomputes_call
    layer.recompute(False)
    assert not FeedForward.from_config(layer.get_config()).recomputes_call
