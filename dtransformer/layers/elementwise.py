"""Elementwise operations whose gradients read the least.

TensorFlow's gradients read the shapes of what was computed with where they are open, and compute
gradients of factors, which nobody asks for: a function whose gradient is taken outside of it keeps
all that. Where shapes are not known to be as is said here, the operations are TensorFlow's.
"""

import tensorflow as tf

from dtransformer.parallel.ops.custom_gradient import custom_gradient


def add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the sum of tensors of one shape."""
    if not _are_alike(x.shape, y.shape):
        return x + y

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, dy)

    return total(x, y)


def add_to_each(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return x [b, ...] and y [...], which is added to each of b."""
    if not _are_alike(x.shape[1:], y.shape):
        return x + y

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, tf.reduce_sum(dy, axis=0))

    return total(x, y)


def scale(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return x times a factor that has no gradient, and that broadcasts to the shape of x."""
    if not _broadcasts(factor, x):
        return x * factor

    @custom_gradient
    def times(x):
        return x * factor, lambda dy: dy * factor

    return times(x)


def select(mask: tf.Tensor, x: tf.Tensor, other: float) -> tf.Tensor:
    """Return x where a mask is true, and a number elsewhere.

    Args:
        mask: bool tensor or array that broadcasts to the shape of x.
        x: tensor.
        other: the number.
    """
    number = lambda value: tf.constant(value, x.dtype)
    if not _broadcasts(mask, x):
        return tf.where(mask, x, number(other))

    @custom_gradient
    def chosen(x):
        return tf.where(mask, x, number(other)), lambda dy: tf.where(mask, dy, number(0))

    return chosen(x)


def soft_capped(x: tf.Tensor, cap: float) -> tf.Tensor:
    """Return c·tanh(x / c): numbers x that stay below a cap c (Gemma Team, 2024, 2408.00118, §2)."""
    return cap * tf.tanh(x / cap)


def check_soft_cap(cap: float | None) -> float | None:
    """Return a cap; None for none.

    Raises:
        ValueError: it is not more than 0.
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"soft_cap must be more than 0, got {cap}")
    return cap


def _are_alike(shape, other):
    return shape.rank is not None and shape == other


def _broadcasts(y, x):
    """Return whether y is known to broadcast to the shape of x; open dimensions are alike."""
    shape = tf.broadcast_static_shape(tf.TensorShape(y.shape), x.shape)  # a mask may be an array
    return _are_alike(shape, x.shape)
