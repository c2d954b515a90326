"""Two passes give the gradients of a tape, and store no weights in between."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.tracing.two_passes import TwoPasses

RNG = np.random.default_rng(0)
X = tf.constant(RNG.normal(size=(4, 6)), tf.float32)
WEIGHTS = [tf.constant(RNG.normal(size=shape), tf.float32) for shape in ((6, 6), (6, 6), (6,))]
SEED = tf.constant([1, 2])


def products(inputs, constants, weights):
    (x,) = inputs
    a, b, bias = weights
    y = tf.nn.gelu(tf.matmul(x, tf.transpose(2.0 * a)))
    noise = tf.random.stateless_uniform(tf.shape(y), constants[0])
    return [tf.matmul(y * noise, b) + bias], [tf.reduce_sum(y)]


def loop(inputs, constants, weights):
    (x,) = inputs
    a, b, bias = weights

    def body(i, y):
        return i + 1, tf.tanh(tf.matmul(y, b))

    _, y = tf.while_loop(lambda i, y: i < 3, body, [0, tf.matmul(x, a)])
    return [y + bias], []


def hand_written(inputs, constants, weights):
    (x,) = inputs
    a, b, bias = weights

    @tf.custom_gradient
    def square(y):
        return y * y, lambda dy: 2 * y * dy

    return [square(tf.matmul(x, a)), tf.matmul(x, b) + bias], []


def with_tape(function):
    """Return a `tf.function` of the input and the weights that returns results and gradients."""

    @tf.function(autograph=False)
    def run(x, weights):
        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            results, others = function([x], [SEED], weights)
            loss = tf.add_n([tf.reduce_sum(y * y) for y in results])
        return [*results, *others], tape.gradient(loss, [x, *weights])

    return run


def in_two_passes(function):
    """Return the same function as `with_tape`, computed by `TwoPasses`."""

    @tf.function(autograph=False)
    def run(x, weights):
        passes = TwoPasses(function, [x], [SEED], weights, [True] * len(weights))
        num_differentiable = len(function([x], [SEED], weights)[0])
        results, saved = passes.forward([x], [SEED], weights)
        upstream = [2 * y for y in results[:num_differentiable]]
        copies = [tf.identity(weight) for weight in weights]
        dx, dw = passes.backward(upstream, saved, copies)
        return results, [*dx, *dw]

    return run


def count(graph, kind):
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for function in definition.library.function:
        nodes += function.node_def
    return sum(node.op == kind for node in nodes)


@pytest.mark.parametrize("function", [products, loop, hand_written])
def test_gradients_equal_the_gradients_of_a_tape(function):
    expected = tf.nest.flatten(with_tape(function)(X, WEIGHTS))
    actual = tf.nest.flatten(in_two_passes(function)(X, WEIGHTS))
    for value, expected_value in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-6)


def test_no_product_is_computed_twice():
    @tf.function(autograph=False)
    def run(x, weights):
        passes = TwoPasses(products, [x], [SEED], weights, [True] * 3)
        results, saved = passes.forward([x], [SEED], weights)
        return passes.backward([results[0]], saved, weights)

    expected = count(with_tape(products).get_concrete_function(X, WEIGHTS).graph, "MatMul")
    assert count(run.get_concrete_function(X, WEIGHTS).graph, "MatMul") == expected == 6


@pytest.mark.parametrize("function", [products, hand_written])
def test_saved_tensors_do_not_depend_on_weights_alone(function):
    saved_shapes = []

    @tf.function(autograph=False)
    def run(x, weights):
        passes = TwoPasses(function, [x], [SEED], weights, [True] * 3)
        results, saved = passes.forward([x], [SEED], weights)
        saved_shapes.extend(tuple(tensor.shape) for tensor in saved)
        return results

    run.get_concrete_function(X, WEIGHTS)
    assert saved_shapes
    assert (6, 6) not in saved_shapes


def test_frozen_and_unused_weights_have_no_gradient():
    def function(inputs, constants, weights):
        return [tf.matmul(inputs[0], weights[0]) + weights[2]], []

    @tf.function(autograph=False)
    def run(x, weights):
        passes = TwoPasses(function, [x], [], weights, [True, True, False])
        results, saved = passes.forward([x], [], weights)
        _, gradients = passes.backward(results, saved, weights)
        assert [gradient is None for gradient in gradients] == [False, True, True]
        return gradients[0]

    y = X @ WEIGHTS[0] + WEIGHTS[2]
    expected = tf.matmul(X, y, transpose_a=True)
    np.testing.assert_allclose(run(X, WEIGHTS), expected, rtol=1e-5, atol=1e-5)
