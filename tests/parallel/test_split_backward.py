"""Delayed gradients of kernels equal the gradients of the ordinary backward pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import FeedForward, MultiHeadAttention
from dtransformer.parallel.ops.split_backward import kernel_gradients, splitting_backward
from dtransformer.parallel.recompute.recompute import recomputed


class Block(keras.layers.Layer):
    """Layer with joint products, products by heads, biases and an activation."""

    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(8, 2, 0.0, 0.0)
        self.ffn = FeedForward(8, 12, 0.0)

    def call(self, x):
        return self.ffn(x + self.attention(x, x, x))


def compute_gradients(compute, x, block):
    weights = block.trainable_variables
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss, deferred = compute(x)
    return tape.gradient(loss, [x, *[w.value for w in weights]]), deferred


@pytest.fixture
def block_and_x():
    keras.utils.set_random_seed(0)
    block, x = Block(), tf.random.normal([3, 4, 8])
    block(x)
    return block, x


def test_deferred_kernel_gradients_equal_direct_gradients(block_and_x):
    block, x = block_and_x

    @tf.function(autograph=False)
    def direct(x):
        return tf.reduce_sum(tf.sin(block(x))), {}

    @tf.function(autograph=False)
    def split(x):
        with splitting_backward() as deferred:
            return tf.reduce_sum(tf.sin(block(x))), deferred

    expected, _ = compute_gradients(direct, x, block)
    actual, deferred = compute_gradients(split, x, block)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    assert len(deferred) == 6  # query, key, value, output, and the two of the feed-forward network
    for weight, gradient, expected_gradient in zip(
        block.trainable_variables, actual[1:], expected[1:], strict=True
    ):
        if weight.path in deferred:
            (gradient,) = kernel_gradients([(deferred[weight.path], gradient)])
        np.testing.assert_allclose(tf.reshape(gradient, weight.shape), expected_gradient, atol=1e-5)


def test_recomputed_blocks_do_not_defer_gradients(block_and_x):
    block, x = block_and_x
    with splitting_backward() as deferred:
        recomputed(block, [x], block.trainable_variables)
    assert deferred == {}


def test_rejects_a_kernel_that_is_used_twice(block_and_x):
    block, x = block_and_x
    with (
        splitting_backward(),
        pytest.raises(ValueError, match="more than once.*`pipeline_schedule='1f1b'`"),
    ):
        block(block(x))
