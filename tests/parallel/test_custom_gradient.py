"""Custom gradients work like `tf.custom_gradient` and save fewer tensors."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import TransformerEncoderLayer
from dtransformer.parallel.ops.custom_gradient import custom_gradient

X = tf.constant([3.0, 5.0])


@custom_gradient
def halves(x):
    """Return two results with different custom gradients."""
    return (x * x, x + 1.0), lambda dy, dz: 0.5 * dy + 10.0 * dz


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", ["eager", "function", "inner function", "xla"])
def test_unused_results_contribute_no_gradient(used, kind):
    inner = tf.function(halves, autograph=False) if kind == "inner function" else halves

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = inner(x)
            loss = sum(tf.reduce_sum(results[i]) for i in used)
        return tape.gradient(loss, x)

    if kind != "eager":
        gradient = tf.function(gradient, autograph=False, jit_compile=kind == "xla")
    expected = (0.5 if 0 in used else 0.0) + (10.0 if 1 in used else 0.0)
    np.testing.assert_array_equal(gradient(X), [expected] * 2)


def test_rejects_variables_read_inside():
    weight = tf.Variable(2.0, name="weight")

    @tf.function(autograph=False)
    def run(x):
        return custom_gradient(lambda x: (x * weight, lambda dy: dy))(x)

    with pytest.raises(TypeError, match="weight.* so their gradients would be lost"):
        run(X)


def test_graph_is_freed_with_its_function():
    def run(x):
        return custom_gradient(lambda x: (x * 2.0, lambda dy: dy))(x)

    graph = weakref.ref(tf.function(run, autograph=False).get_concrete_function(X).graph)
    gc.collect()
    assert graph() is None


def test_layer_with_custom_gradients_can_be_exported(tmp_path):
    inputs = keras.Input((5, 8))
    model = keras.Model(inputs, TransformerEncoderLayer(8, 2, 16, hidden_act="gelu")(inputs))
    model.export(tmp_path / "model", verbose=False)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-5, atol=1e-5)
