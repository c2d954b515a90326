"""Products of queries with keys, and of probabilities with values, whose heads may be shared."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.axis_rules import constrain
from dtransformer.parallel.shapes import static_or_dynamic_shape


def scores_of(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Return q · kᵀ [..., n, s, t] of q [..., n, s, d] and k [..., m, t, d]."""
    return by_shared_heads(lambda q: _product(q, k, transpose_k=True), q, k)


def context_of(p: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """Return p · v [..., n, s, d] of p [..., n, s, t] and v [..., m, t, d]."""
    return by_shared_heads(lambda p: _product(p, v), p, v)


def _product(x, y, transpose_k=False):
    """`tf.matmul`; in a loop that decodes by TensorFlow's own kernel.

    On CPUs that of oneDNN, which TensorFlow takes for `tf.matmul`, is half as fast for so few rows.
    """
    if trace.current().around_loop is None or x.dtype != "float32":
        return tf.matmul(x, y, transpose_b=transpose_k)
    return tf.raw_ops.BatchMatMulV3(x=x, y=y, Tout=x.dtype, adj_y=transpose_k)


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
    y = product(constrain(tf.reshape(x, [*leading, m, n // m * s, d]), axes))
    return tf.reshape(constrain(y, axes), [*leading, n, s, static_or_dynamic_shape(y)[-1]])
