import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers.activations import gated, gelu, gelu_tanh, get_activation, silu

PAIRS = {
    "gelu": (gelu, keras.activations.gelu),
    "gelu_tanh": (gelu_tanh, lambda x: keras.activations.gelu(x, approximate=True)),
    "silu": (silu, keras.activations.silu),
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


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("name", [*PAIRS, "relu"])
def test_gates_have_the_gradients_of_products(name, dtype, tolerance, traced):
    own, of_keras = PAIRS.get(name, [keras.activations.relu] * 2)
    values = np.random.default_rng(0).normal(size=(2, 60)) * 3
    run = functools.partial(gated, own)
    run = tf.function(run) if traced else run
    found = product_and_gradients(run, values.astype(dtype))
    expected = product_and_gradients(lambda gate, x: of_keras(gate) * x, values)
    for own, reference in zip(found, expected):
        assert own.dtype == dtype
        np.testing.assert_allclose(own, reference, rtol=tolerance, atol=4 * tolerance)


def product_and_gradients(function, values):
    gate, x = map(tf.constant, values)
    with tf.GradientTape() as tape:
        tape.watch([gate, x])
        y = function(gate, x)
    upstream = tf.cast(tf.sin(tf.range(float(len(x)))), x.dtype)
    return [one.numpy() for one in (y, *tape.gradient(y, [gate, x], upstream))]


@pytest.mark.parametrize("name, number", [("silu", 3), ("gelu", 4), ("gelu_tanh", 4)])
def test_what_gates_keep(name, number):
    """What a product reads afterwards, too: the gate, the other factor, the result; and a share."""

    @tf.function(autograph=False)
    def product(gate, x):
        return tf.matmul(gated(PAIRS[name][0], gate, x), x, transpose_b=True)

    @tf.function(autograph=False)
    def run(gate, x):
        with tf.GradientTape() as tape:
            tape.watch([gate, x])
            y = product(gate + 1, x + 1)
        return tape.gradient(y, [gate, x])

    graph = run.get_concrete_function(*[tf.TensorSpec([4, None])] * 2).graph
    (_, backward) = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    kept = {x.ref() for x in backward.inputs if x.shape.as_list() == [4, None]}
    assert len(kept) == number
