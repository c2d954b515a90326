"""Elementwise operations match TensorFlow's values and gradients, and store less."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import elementwise

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 3, 4))
ROWS, MASK = RNG.normal(size=(3, 4)), RNG.random(size=(2, 1, 4)) < 0.5

# Function, TensorFlow equivalent, arguments with gradients.
CASES = {
    "add": (elementwise.add, lambda x, y: x + y, [X, Y]),
    "add_to_rows": (elementwise.add_to_rows, lambda x, y: x + y, [X, ROWS]),
    "scale": (
        lambda x: elementwise.scale(x, tf.constant(MASK, x.dtype)),
        lambda x: x * tf.constant(MASK, x.dtype),
        [X],
    ),
    "select": (
        lambda x: elementwise.select(tf.constant(MASK), x, x.dtype.min),
        lambda x: tf.where(tf.constant(MASK), x, tf.constant(x.dtype.min, x.dtype)),
        [X],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_match_tensorflow(case, dtype, compiled):
    function, expected_function, arguments = CASES[case]
    arguments = [tf.constant(x, dtype) for x in arguments]

    def results(function):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            y = function(*arguments)
            loss = tf.reduce_sum(tf.tanh(tf.cast(y, "float32")))
        return [y, *tape.gradient(loss, arguments)]

    run = tf.function(results, autograph=False) if compiled else results
    for actual, expected in zip(run(function), results(expected_function), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("case", CASES)
def test_gradients_store_no_arguments(case):
    function, _, arguments = CASES[case]
    inner = tf.function(lambda *args: function(*(tf.identity(x) for x in args)), autograph=False)

    @tf.function(autograph=False)
    def gradients(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = inner(*args)
        return tape.gradient(y, args)

    open_shapes = [tf.TensorSpec([*x.shape[:-2], None, x.shape[-1]], "float32") for x in arguments]
    graph = gradients.get_concrete_function(*open_shapes).graph
    forward = next(op for op in graph.get_operations() if op.type == "PartitionedCall")
    # `scale` stores its mask.
    assert [x.dtype for x in forward.outputs].count(tf.float32) == 1 + (case == "scale")


def test_broadcasting_operands_match_tensorflow():
    x, y = tf.constant(X[:1]), tf.constant(Y)
    mask = tf.constant(MASK)
    for function, expected_function in (
        (elementwise.add, lambda x: x + y),
        (elementwise.add_to_rows, lambda x: x + y),
        (lambda x, _: elementwise.select(mask, x, 0.0), lambda x: tf.where(mask, x, 0.0)),
        (lambda x, y: elementwise.scale(x, y), lambda x: x * y),
    ):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            actual, expected = function(x, y), expected_function(x)
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(tape.gradient(actual, x), tape.gradient(expected, x))
