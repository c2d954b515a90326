"""The core of attention: queries, keys, values and a mask give the context."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.axis_rules import constrain
from dtransformer.parallel.shapes import static_or_dynamic_shape


def attention(
    q: tf.Tensor,
    keys: list[tf.Tensor],
    values: list[tf.Tensor],
    mask: tf.Tensor | None = None,
    dropout: Callable = lambda probabilities: probabilities,
    softmax_compute_type: str = "float32",
) -> tf.Tensor:
    """Return the context of queries.

    Keys and values may have fewer heads than queries: n / m heads of queries that follow each
    other share one of keys and values (Ainslie et al., 2023, "GQA", arXiv 2305.13245), which is
    not repeated. A position that is masked has a probability of exactly 0, and a query that may
    attend nowhere a context of 0.

    Args:
        q: tensor [b, n, s, d], scaled.
        keys: list of tensors [b, m, t, d], whose positions follow each other, so that a cache
            need not be put together; m divides n.
        values: list of tensors [b, m, t, d], one for each.
        mask: tensor of 0 and 1, or bool: [b, t], [b, s, t], [b, 1, t] or [b, n or 1, s, t], t
            being all positions; 1 where a query may attend. None for everywhere.
        dropout: a function of the probabilities.
        softmax_compute_type: type that the softmax is computed in.

    Returns:
        A tensor [b, n, s, d].
    """
    scores = [
        _by_shared_heads(lambda q, k=k: tf.matmul(q, k, transpose_b=True), q, k) for k in keys
    ]
    scores = scores[0] if len(keys) == 1 else tf.concat(scores, axis=-1)
    scores = constrain(scores, ("batch", "heads", None, "memory_length"))
    scores = tf.cast(scores, softmax_compute_type)
    any_allowed = None
    if mask is not None:
        allowed = expand_mask(mask)
        any_allowed = tf.reduce_any(allowed, axis=-1, keepdims=True)
        scores = tf.where(allowed, scores, tf.constant(scores.dtype.min, scores.dtype))
    probabilities = [dropout(tf.cast(tf.nn.softmax(scores), values[0].dtype))]
    if len(values) > 1:
        sizes = [static_or_dynamic_shape(v)[2] for v in values]
        probabilities = tf.split(probabilities[0], sizes, axis=-1)
    parts = [
        _by_shared_heads(lambda p, v=v: tf.matmul(p, v), p, v)
        for p, v in zip(probabilities, values)
    ]
    context = parts[0] if len(parts) == 1 else tf.add_n(parts)
    if any_allowed is not None:
        context *= tf.cast(any_allowed, context.dtype)
    return constrain(context, ("batch", "heads", None, "head_dim"))


def _by_shared_heads(product, x, shared):
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


def expand_mask(mask: tf.Tensor) -> tf.Tensor:
    """Return a mask as bool [b, n or 1, s or 1, t]."""
    mask = tf.cast(mask, "bool")
    if len(mask.shape) == 2:
        return mask[:, None, None, :]
    return mask[:, None, :, :] if len(mask.shape) == 3 else mask
