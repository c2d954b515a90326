"""Online softmax over blocks of keys and its gradient, and products with shared heads.

Scores are -inf for masked keys.

References:

- [Milakov and Gimelshein, 2018](https://arxiv.org/abs/1805.02867)
- [Dao et al., 2022](https://arxiv.org/abs/2205.14135) (FlashAttention), section 3.1
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dtransformer.layers.dropout import DropoutMasks
from dtransformer.parallel.mesh.axis_rules import constrain_both
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def scores_of(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Return q · kᵀ.

    Args:
        q: Tensor of shape `[..., n, s, d]`.
        k: Tensor of shape `[..., m, t, d]`. m divides n.

    Returns:
        A tensor of shape `[..., n, s, t]`.
    """
    return by_shared_heads(lambda q: tf.matmul(q, k, transpose_b=True), q, k)


def context_of(p: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """Return p · v.

    Args:
        p: Tensor of shape `[..., n, s, t]`.
        v: Tensor of shape `[..., m, t, d]`. m divides n.

    Returns:
        A tensor of shape `[..., n, s, d]`.
    """
    return by_shared_heads(lambda p: tf.matmul(p, v), p, v)


def where_seen(scores: tf.Tensor, seen: tf.Tensor | None) -> tf.Tensor:
    """Set masked scores to -inf. `seen=None` masks nothing."""
    return scores if seen is None else tf.where(seen, scores, tf.constant(-math.inf, scores.dtype))


def by_heads(x: tf.Tensor) -> tf.Tensor:
    """Reshape a tensor with one element per head from `[n]` to `[1, n, 1, 1]`."""
    return tf.reshape(x, [1, x.shape[0], 1, 1])


def by_shared_heads(product: Callable, x: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
    """Apply a matrix product to heads that share a head of the second operand.

    Equal to `product(x)` with `shared` repeated n / m times. Instead of repeating it, the rows of
    the n / m heads in a group are concatenated.

    Args:
        product: Function of a tensor `[..., m, rows, d]` that multiplies it by `shared` and returns
            `[..., m, rows, columns]`.
        x: Tensor of shape `[..., n, s, d]`.
        shared: Tensor of shape `[..., m, t, d]`.

    Returns:
        A tensor of shape `[..., n, s, columns]`.
    """
    *leading, n, s, d = static_or_dynamic_shape(x)
    m = shared.shape[-3]
    if n == m:
        return product(x)
    axes = ("length_shards", "batch", "heads", None, None)[-len(x.shape) :]
    y = product(constrain_both(tf.reshape(x, [*leading, m, n // m * s, d]), axes))
    return tf.reshape(constrain_both(y, axes), [*leading, n, s, static_or_dynamic_shape(y)[-1]])


class OnlineSoftmax:
    """Attention output of a block of queries, accumulated over blocks of keys.

    Args:
        sinks: Tensor of shape `[..., 1, 1]`, an extra score for each query. It is added to the sum
            of exponentials and not to the context, see `attention`. Defaults to `None`.

    Attributes:
        context: Tensor of shape `[..., s, d]`, not yet normalized, or `None` before the first
            block.
    """

    def __init__(self, sinks: tf.Tensor | None = None):
        self.context = self._highest = self._total = None
        if sinks is not None:
            self.context, self._highest, self._total = 0.0, sinks, 1.0

    def add(self, scores: tf.Tensor, context_of: Callable) -> None:
        """Add a block of keys.

        Args:
            scores: Tensor of shape `[..., s, t]`.
            context_of: Function of exponentials `[..., s, t]` that returns their product with the
                block's values, `[..., s, d]`.
        """
        # The finite lower bound makes all exponentials 0 if a query sees no key.
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
        """Return the normalized context and the log-sum-exp of the scores.

        Returns:
            A tuple of tensors of shape `[..., s, d]` and `[..., s, 1]`.
        """
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
    """Return the gradients of a block of keys, whose scores are computed again.

    Args:
        scores_of: Function of `tensors` that returns the block's scores `[..., s, t]`.
        context_of: Function of probabilities and v that returns their product.
        tensors: List of tensors that the scores depend on.
        v: Tensor of shape `[..., t, d]`.
        dy: Tensor of shape `[..., s, d]`, the gradient of the context.
        log_sums: Tensor of shape `[..., s, 1]`, from `OnlineSoftmax.results` after all blocks.
        means: Tensor of shape `[..., s, 1]`, the row sums of dy · context. They equal the mean
            gradient of the probabilities.

    Returns:
        A tuple: the list of the gradients of `tensors`, and the gradient of v.
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
    """Return the gradients of the sinks, a list of one tensor or an empty list.

    Args:
        sinks: List of one tensor of shape `[..., 1, 1]`, or an empty list.
        log_sums, means: Tensors of shape `[..., s, 1]`, see `block_gradients`.
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
    """Return the contribution of a block of keys to the context, in the compute type.

    Args:
        probabilities: Tensor of shape `[..., n, s, t]`, probabilities or multiples of them.
        v: Tensor of shape `[..., m, t, d]`.
        kept: Dropout mask, or `None`.
        dropout: The `DropoutMasks` of the mask, or `None`.
        compute_type: Name of the result's type.
    """
    probabilities = tf.cast(probabilities, v.dtype)
    if kept is not None:
        probabilities = dropout.drop(probabilities, kept)
    return tf.cast(context_of(probabilities, v), compute_type)


def within(length: int, x: tf.Tensor, start: int, end: int) -> tf.Tensor:
    """Pad x along its second to last dimension: x holds positions `start` to `end` of `length`.

    Args:
        length: Integer. Size of the dimension after padding.
        x: Tensor of shape `[..., end - start, d]`.
        start, end: Integers. Positions of x in the result.

    Returns:
        A tensor of shape `[..., length, d]`, 0 outside of `start` and `end`.
    """
    # Adding to a tensor of zeros would keep the zeros of every block in memory.
    return tf.pad(x, [*[[0, 0]] * (x.shape.rank - 2), [start, length - end], [0, 0]])
