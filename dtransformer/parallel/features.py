"""Operations along features, the last dimension, in the form that is fastest on one device."""

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.axis_rules import mesh_axis
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.shapes import static_or_dynamic_shape


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
    leading = x.shape.rank - rank
    if trace.is_on_mesh():
        if mesh_axis("length") or mesh_axis("inner_length"):  # one sum of features alone is sent
            return tf.reduce_sum(x, axis=list(range(leading)))
        for axis in reversed(range(leading)):  # a quarter of the time of all at once, on CPUs
            x = tf.reduce_sum(x, axis)
        return x
    features = x.shape[leading:]
    flat = tf.reshape(x, [-1, features.num_elements()])
    # Four times as fast as a sum on CPUs.
    return tf.reshape(tf.raw_ops.BiasAddGrad(out_backprop=flat), features)


def mean_of_features(x: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Return the mean of x · weights over the features: [..., h] -> [..., 1].

    Args:
        x: tensor [..., h].
        weights: tensor [h]; None for 1.
    """
    size = x.shape[-1]
    if weights is None:
        if trace.is_on_mesh():
            return tf.reduce_mean(x, axis=-1, keepdims=True)
        weights = tf.ones([size], x.dtype)
    kernel = tf.reshape(weights / size, [-1, 1])
    if trace.is_on_mesh():
        names = "abcdefgh"[: x.shape.rank - 1]
        return tf.einsum(f"{names}y,yz->{names}z", x, kernel)
    flat = tf.matmul(tf.reshape(x, [-1, size]), kernel)
    return tf.reshape(flat, [*static_or_dynamic_shape(x)[:-1], 1])
