"""Operations along features equal plain TensorFlow operations, and so do gradients."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.ops.feature_reductions import (
    add_bias,
    mean_over_features,
    sum_to_features,
)

RNG = np.random.default_rng(0)


def values(*shape):
    return tf.constant(RNG.normal(size=shape), "float64")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("shape", "rank"), [((2, 3, 4), 1), ((5, 3), 1), ((2, 3, 4, 5), 2)])
def test_add_bias_and_its_gradient(shape, rank, compiled):
    def gradients(add, x, bias, dy):
        with tf.GradientTape() as tape:
            tape.watch([x, bias])
            y = add(x, bias)
        return y, *tape.gradient(y, [x, bias], dy)

    run = tf.function(gradients) if compiled else gradients
    inputs = values(*shape), values(*shape[-rank:]), values(*shape)
    for actual, expected in zip(run(add_bias, *inputs), gradients(tf.add, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_sum_to_features_and_mean_of_features():
    x, weights = values(2, 3, 4), values(4)
    np.testing.assert_allclose(sum_to_features(x), tf.reduce_sum(x, [0, 1]), rtol=1e-12)
    np.testing.assert_allclose(sum_to_features(x, 2), tf.reduce_sum(x, 0), rtol=1e-12)
    mean = tf.reduce_mean(x, -1, keepdims=True)
    np.testing.assert_allclose(mean_over_features(x), mean, rtol=1e-12)
    mean = tf.reduce_mean(x * weights, -1, keepdims=True)
    np.testing.assert_allclose(mean_over_features(x, weights), mean, rtol=1e-12)
