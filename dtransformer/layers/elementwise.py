"""Elementwise operations whose gradients store as little as possible.

TensorFlow's gradients read the shapes of operands with unknown dimensions and compute gradients of
constant factors. A function whose gradient is computed outside of it would store all of these
tensors. If the shapes are not known to meet the requirements below, the functions fall back to
TensorFlow's operations.
"""

import tensorflow as tf

from dtransformer.parallel.ops.custom_gradient import custom_gradient


def add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return x + y for tensors of the same shape."""
    if not _same_shape(x.shape, y.shape):
        return x + y

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, dy)

    return total(x, y)


def add_to_rows(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return x + y, where x is `[b, ...]` and y is `[...]` and is added to each of the b rows."""
    if not _same_shape(x.shape[1:], y.shape):
        return x + y

    @custom_gradient
    def total(x, y):
        return x + y, lambda dy: (dy, tf.reduce_sum(dy, axis=0))

    return total(x, y)


def scale(x: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return x · factor, where `factor` broadcasts to the shape of x and has no gradient."""
    if not _broadcasts(factor, x):
        return x * factor

    @custom_gradient
    def times(x):
        return x * factor, lambda dy: dy * factor

    return times(x)


def select(mask: tf.Tensor, x: tf.Tensor, otherwise: float) -> tf.Tensor:
    """Return x where a mask is true, and a constant elsewhere.

    Args:
        mask: Boolean tensor or array that broadcasts to the shape of x.
        x: Tensor.
        other: Float. The value elsewhere.
    """

    def constant(value):
        return tf.constant(value, x.dtype)

    if not _broadcasts(mask, x):
        return tf.where(mask, x, constant(otherwise))

    @custom_gradient
    def chosen(x):
        return tf.where(mask, x, constant(otherwise)), lambda dy: tf.where(mask, dy, constant(0))

    return chosen(x)


def apply_soft_cap(x: tf.Tensor, cap: float) -> tf.Tensor:
    """Return c·tanh(x / c), which keeps x between −c and c.

    Reference: [Gemma Team, 2024](https://arxiv.org/abs/2408.00118), section 2
    """
    return cap * tf.tanh(x / cap)


def check_soft_cap(cap: float | None) -> float | None:
    """Return the cap unchanged. `None` disables it.

    Raises:
        ValueError: If the cap is not above 0.
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"`soft_cap` must be above 0, got {cap}.")
    return cap


def _same_shape(shape, other):
    return shape.rank is not None and shape == other


def _broadcasts(y, x):
    """Return whether y is known to broadcast to x. Unknown dimensions are treated as equal."""
    # A mask may be a NumPy array.
    shape = tf.broadcast_static_shape(tf.TensorShape(y.shape), x.shape)
    return _same_shape(shape, x.shape)
