"""Operations along features, the last dimensions."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.custom_gradient import custom_gradient, prevent_reuse
from dtransformer.parallel.tracing import trace


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Return x + bias, with a gradient that sums 16-bit rows by a matrix product.

    Args:
        x: Tensor of shape `[..., *features]`.
        bias: Tensor or variable of shape `[*features]`.
    """
    bias = tf.cast(bias, x.dtype)
    if trace.is_on_mesh():
        return x + bias
    rank = bias.shape.rank

    @custom_gradient
    def add(x, bias):
        return x + bias, lambda dy: (dy, _sum_of_rows(dy, rank))

    return add(x, bias)


def _sum_of_rows(x, rank):
    """Sum over all dimensions except the last `rank`. 16-bit rows are multiplied by ones."""
    if x.dtype.size > 2:
        return sum_to_features(x, rank)
    features = x.shape[x.shape.rank - rank :]
    rows = tf.reshape(x, [-1, features.num_elements()])
    # Use separate ones; XLA would merge all products with shared ones.
    ones = tf.ones_like(rows[:, :1])
    if _compat.is_compiled_by_xla():  # XLA would otherwise write the rows again in 32 bits.
        ones, rows = _compat.barrier([ones, rows])
    else:
        ones = prevent_reuse(ones, rows)
    return tf.reshape(tf.matmul(ones, rows, transpose_a=True), features)


def sum_to_features(x: tf.Tensor, rank: int = 1) -> tf.Tensor:
    """Sum over all dimensions except the last `rank`."""
    return tf.reduce_sum(x, axis=list(range(x.shape.rank - rank)))


def mean_over_features(
    x: tf.Tensor, weights: tf.Tensor | None = None, axes: int | tuple[int, ...] = -1
) -> tf.Tensor:
    """Return the mean of x · weights over the features, with `keepdims`: `[..., h]` -> `[..., 1]`.

    Args:
        x: Tensor of shape `[..., h]`.
        weights: Tensor of shape `[h]`. Defaults to 1.
        axes: Integer or tuple of integers. Feature dimensions. Defaults to `-1`.
    """
    return tf.reduce_mean(x if weights is None else x * weights, axis=axes, keepdims=True)
