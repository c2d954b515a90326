"""Products of queries with keys, and of probabilities with values, whose heads may be shared."""

import math
from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain_both
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def scores_of(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Return q · kᵀ [..., n, s, t] of q [..., n, s, d] and k [..., m, t, d]."""
    return by_shared_heads(lambda q: tf.matmul(q, k, transpose_b=True), q, k)


def context_of(p: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """Return p · v [..., n, s, d] of p [..., n, s, t] and v [..., m, t, d]."""
    return by_shared_heads(lambda p: tf.matmul(p, v), p, v)


def where_seen(scores: tf.Tensor, seen: tf.Tensor | None) -> tf.Tensor:
    """Return scores, -∞ where a query may not attend; None for everywhere."""
    return scores if seen is None else tf.where(seen, scores, tf.constant(-math.inf, scores.dtype))


def by_heads(x: tf.Tensor) -> tf.Tensor:
    """Return a number of each head [n] as [1, n, 1, 1]."""
    return tf.reshape(x, [1, x.shape[0], 1, 1])


def by_shared_heads(product: Callable, x: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
    """Return product(x) of x [..., n, s, d], as if `shared` [..., m, t, d] were repeated n / m times.

    The rows of the heads that share one are multiplied with it together. Before the heads are
    rows, or shards of sequences and rows.
    """
    *leading, n, s, d = static_or_dynamic_shape(x)
    m = shared.shape[-3]
    if n == m:
        return product(x)
    axes = ("length_shards", "batch", "heads", None, None)[-len(x.shape) :]
    y = product(constrain_both(tf.reshape(x, [*leading, m, n // m * s, d]), axes))
    return tf.reshape(constrain_both(y, axes), [*leading, n, s, static_or_dynamic_shape(y)[-1]])
