import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers.activations import gelu, gelu_tanh, get_activation

PAIRS = {
    "gelu": (gelu, keras.activations.gelu),
    "gelu_tanh": (gelu_tanh, lambda x: keras.activations.gelu(x, approximate=True)),
}


def result_and_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y.numpy(), tape.gradient(y, x, tf.cast(tf.sin(tf.range(float(len(x)))), x.dtype)).numpy()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("name", PAIRS)
def test_results_and_gradients_are_those_of_keras(name, dtype, tolerance, traced):
    own, of_keras = PAIRS[name]
    assert get_activation(name) is own
    x = np.concatenate([np.linspace(-12, 12, 97), [0.0, -0.0, 1e-4, -50.0, 50.0]])
    run = tf.function(own) if traced else own
    found = result_and_gradient(run, tf.constant(x, dtype))
    expected = result_and_gradient(of_keras, tf.constant(x, "float64"))
    for own, reference in zip(found, expected):
        assert own.dtype == dtype
        np.testing.assert_allclose(own, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype, large", [("float32", 1e6), ("float16", 700.0)])
def test_gradients_of_large_values(name, dtype, large):
    x = tf.constant([-large, large], dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = PAIRS[name][0](x)
    np.testing.assert_array_equal(tape.gradient(y, x), [0, 1])
