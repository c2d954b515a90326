"""Products of queries with keys, and of probabilities with values, whose heads may be shared."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.axis_rules import constrain
from dtransformer.parallel.shapes import static_or_dynamic_shape


def scores_of(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Return q · kᵀ [b, n, s, t] of q [b, n, s, d] and k [b, m, t, d]."""
    return by_shared_heads(lambda q: tf.matmul(q, k, transpose_b=True), q, k)


def by_shared_heads(product: Callable, x: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
    """Return product(x) of x [b, n, s, …], as if `shared` [b, m, …] were repeated n / m times.

    The rows of the heads that share one are multiplied with it together.
    """
    b, n, s, d = static_or_dynamic_shape(x)
    m = shared.shape[1]
    if n == m:
        return product(x)
    axes = ("batch", "heads", None, None)
    y = product(constrain(tf.reshape(x, [b, m, n // m * s, d]), axes))
    return tf.reshape(constrain(y, axes), [b, n, s, static_or_dynamic_shape(y)[-1]])
