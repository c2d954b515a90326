"""Operations along features, the last dimension."""

import tensorflow as tf

from dtransformer.parallel.ops.custom_gradient import custom_gradient
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
        return x + bias, lambda dy: (dy, sum_to_features(dy, rank))

    return add(x, bias)


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
