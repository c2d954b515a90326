"""Operations along features, the last dimension."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.custom_gradient import computed_anew, custom_gradient
from dtransformer.parallel.tracing import trace


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Return x + bias.

    Args:
        x: tensor [..., *features].
        bias: tensor or variable [*features].
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
    """Return the sum over all dimensions but the last ones, of 16 bits as a product with ones."""
    if x.dtype.size > 2:
        return sum_to_features(x, rank)
    features = x.shape[x.shape.rank - rank :]
    rows = tf.reshape(x, [-1, features.num_elements()])
    # Ones of its own: XLA would join all such products.
    ones = tf.ones_like(rows[:, :1])
    if _compat.is_compiled_by_xla():  # which else would write the rows once more, of 32 bits
        ones, rows = _compat.barrier([ones, rows])
    else:
        ones = computed_anew(ones, rows)
    return tf.reshape(tf.matmul(ones, rows, transpose_a=True), features)


def sum_to_features(x: tf.Tensor, rank: int = 1) -> tf.Tensor:
    """Return the sum over all dimensions but the last `rank` ones."""
    return tf.reduce_sum(x, axis=list(range(x.shape.rank - rank)))


def mean_of_features(
    x: tf.Tensor, weights: tf.Tensor | None = None, axes: int | tuple[int, ...] = -1
) -> tf.Tensor:
    """Return the mean of x · weights over the features: [..., h] -> [..., 1].

    Args:
        x: tensor [..., h].
        weights: tensor [h]; None for 1.
        axes: dimensions that are features.
    """
    return tf.reduce_mean(x if weights is None else x * weights, axis=axes, keepdims=True)
