"""Online softmax of a block of keys, and its gradient; products whose heads may be shared.

References: Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax", arXiv
1805.02867; Dao et al., 2022, "FlashAttention", arXiv 2205.14135, §3.1. Scores are -inf where a query
may not attend.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dtransformer.layers.dropout import DropoutMasks
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


class OnlineSoftmax:
    """The context of a block of queries, to which blocks of keys are added one after the other.

    Args:
        sinks: tensor of which each query has one score [..., 1, 1] besides those of its keys, that adds
            to the sum of exponentials and not to the context (see `attention`); None for none.

    Attributes:
        context: tensor [..., s, d], not yet divided; None before the first block.
    """

    def __init__(self, sinks: tf.Tensor | None = None):
        self.context = self._highest = self._total = None
        if sinks is not None:
            self.context, self._highest, self._total = 0.0, sinks, 1.0

    def add(self, scores: tf.Tensor, context_of: Callable) -> None:
        """Add a block of keys.

        Args:
            scores: tensor [..., s, t].
            context_of: a function of exponentials [..., s, t] that returns what the block adds
                to the context, [..., s, d].
        """
        # Of a query that sees nothing all exponentials are 0.
        highest = tf.maximum(tf.reduce_max(scores, -1, keepdims=True), scores.dtype.min / 2)
        if self.context is not None:
            highest = tf.maximum(highest, self._highest)
        exponentials = tf.exp(scores - highest)
        total, context = tf.reduce_sum(exponentials, -1, keepdims=True), context_of(exponentials)
        if self.context is not None:
            less = tf.exp(self._highest - highest)
            total, context = self._total * less + total, self.context * less + context
        self._highest, self._total, self.context = highest, total, context

    def results(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the context [..., s, d], and the logarithms of the sums of exponentials."""
        total = tf.maximum(self._total, np.finfo(self._total.dtype.as_numpy_dtype).tiny)
        return self.context / total, self._highest + tf.math.log(total)


def block_gradients(
    scores_of: Callable,
    context_of: Callable,
    tensors: list[tf.Tensor],
    v: tf.Tensor,
    dy: tf.Tensor,
    log_sums: tf.Tensor,
    means: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the gradients of a block, whose scores are computed again.

    Args:
        scores_of: a function of `tensors` that returns the block's scores [..., s, t].
        context_of: a function of probabilities and v, as that of `OnlineSoftmax.add`.
        tensors: list of what scores depend on.
        v: tensor [..., t, d].
        dy: tensor [..., s, d], the gradient of the context.
        log_sums: tensor [..., s, 1], as from `OnlineSoftmax.results` after all blocks.
        means: tensor [..., s, 1], the sums of dy · context, which are the probabilities'
            gradients' means.

    Returns:
        The list of the gradients of `tensors`, and that of v.
    """
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        scores = scores_of(*tensors)
    probabilities = tf.exp(scores - log_sums)
    with tf.GradientTape() as context_tape:
        context_tape.watch([probabilities, v])
        own = context_of(probabilities, v)
    dp, dv = context_tape.gradient(own, [probabilities, v], tf.cast(dy, own.dtype))
    ds = probabilities * (dp - means)
    return tape.gradient(scores, tensors, ds), dv


def sink_gradients(
    sinks: list[tf.Tensor], log_sums: tf.Tensor, means: tf.Tensor
) -> list[tf.Tensor]:
    """Return the gradients of the sinks, a list of one tensor [..., 1, 1] or none.

    Args:
        sinks: list of what `OnlineSoftmax` was given, if anything.
        log_sums, means: tensors [..., s, 1], as `block_gradients`'.
    """
    found = []
    for own in sinks:
        each = -tf.exp(own - log_sums) * means
        axes = [axis for axis, size in enumerate(own.shape) if size == 1]
        found.append(tf.reduce_sum(each, axes, keepdims=True))
    return found


def block_context(
    probabilities: tf.Tensor,
    v: tf.Tensor,
    kept: tf.Tensor | None,
    dropout: DropoutMasks | None,
    compute_type: str,
) -> tf.Tensor:
    """Return what a block adds to the context, in the compute type.

    Args:
        probabilities: tensor [..., n, s, t], or multiples of them.
        v: tensor [..., m, t, d].
        kept: the mask of `dropout`, or None.
        dropout: how elements are dropped.
        compute_type: name of the type.
    """
    probabilities = tf.cast(probabilities, v.dtype)
    if kept is not None:
        probabilities = dropout.drop(probabilities, kept)
    return tf.cast(context_of(probabilities, v), compute_type)


def within(length: int, x: tf.Tensor, start: int, end: int) -> tf.Tensor:
    """Return x [..., end - start, d] at its positions of so many, with zeros around it."""
    # TensorFlow would keep the zeros themselves for good, those of every block.
    return tf.pad(x, [*[[0, 0]] * (x.shape.rank - 2), [start, length - end], [0, 0]])
