"""Elementwise operations whose gradients read the least.

TensorFlow's read the shapes of what was computed with where they are open, and the gradients of
factors, which nobody asks for: a function whose gradient is taken outside of it keeps all that.
"""

import tensorflow as tf

from dtransformer.parallel.custom_gradient import custom_gradient


def add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the sum of tensors of one shape."""

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, dy)

    return total(x, y)


def add_to_each(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the sum of x [b, ...] and of y [...], which is added to each of b."""

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, tf.reduce_sum(dy, axis=0))

    return total(x, y)


def scale(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return x times a factor that has no gradient, and whose shape broadcasts to that of x."""

    @custom_gradient
    def times(x):
        return x * factor, lambda dy: dy * factor

    return times(x)


def select(mask: tf.Tensor, x: tf.Tensor, other: float) -> tf.Tensor:
    """Return x where a bool mask is true and a number elsewhere; it broadcasts to the shape of x."""
    number = lambda value: tf.constant(value, x.dtype)

    @custom_gradient
    def chosen(x):
        return tf.where(mask, x, number(other)), lambda dy: tf.where(mask, dy, number(0))

    return chosen(x)
