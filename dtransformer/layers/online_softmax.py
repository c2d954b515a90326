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


def attention_scores(q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    """Return q · kᵀ.

    Args:
        q: Tensor of shape `[..., n, s, d]`.
        k: Tensor of shape `[..., m, t, d]`. m divides n.

    Returns:
        A tensor of shape `[..., n, s, t]`.
    """
    return grouped_product(lambda q: tf.matmul(q, k, transpose_b=True), q, k)


def attention_context(p: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    """Return p · v.

    Args:
        p: Tensor of shape `[..., n, s, t]`.
        v: Tensor of shape `[..., m, t, d]`. m divides n.

    Returns:
        A tensor of shape `[..., n, s, d]`.
    """
    return grouped_product(lambda p: tf.matmul(p, v), p, v)


def mask_scores(scores: tf.Tensor, visible: tf.Tensor | None) -> tf.Tensor:
    """Set masked scores to -inf. `seen=None` masks nothing."""
    return (
        scores
        if visible is None
        else tf.where(visible, scores, tf.constant(-math.inf, scores.dtype))
    )


def per_head(x: tf.Tensor) -> tf.Tensor:
    """Reshape a tensor with one element per head from `[n]` to `[1, n, 1, 1]`."""
    return tf.reshape(x, [1, x.shape[0], 1, 1])


def grouped_product(product: Callable, x: tf.Tensor, shared: tf.Tensor) -> tf.Tensor:
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
        self.context = self._max = self._sum = None
        if sinks is not None:
            self.context = 0.0
            self._max = sinks
            self._sum = 1.0

    def add(self, scores: tf.Tensor, compute_context: Callable) -> None:
        """Add a block of keys.

        Args:
            scores: Tensor of shape `[..., s, t]`.
            attention_context: Function of exponentials `[..., s, t]` that returns their product with the
                block's values, `[..., s, d]`.
        """
        # The finite lower bound makes all exponentials 0 if a query sees no key.
        max_scores = tf.maximum(tf.reduce_max(scores, -1, keepdims=True), scores.dtype.min / 2)
        if self.context is not None:
            max_scores = tf.maximum(max_scores, self._max)
        exponentials = tf.exp(scores - max_scores)
        total = tf.reduce_sum(exponentials, -1, keepdims=True)
        context = compute_context(exponentials)
        if self.context is not None:
            decay = tf.exp(self._max - max_scores)
            total = self._sum * decay + total
            context = self.context * decay + context
        self._max = max_scores
        self._sum = total
        self.context = context

    def results(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the normalized context and the log-sum-exp of the scores.

        Returns:
            A tuple of tensors of shape `[..., s, d]` and `[..., s, 1]`.
        """
        total = tf.maximum(self._sum, np.finfo(self._sum.dtype.as_numpy_dtype).tiny)
        return self.context / total, self._max + tf.math.log(total)


def block_gradients(
    compute_scores: Callable,
    compute_context: Callable,
    tensors: list[tf.Tensor],
    v: tf.Tensor,
    dy: tf.Tensor,
    log_sums: tf.Tensor,
    means: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the gradients of a block of keys, whose scores are computed again.

    Args:
        attention_scores: Function of `tensors` that returns the block's scores `[..., s, t]`.
        attention_context: Function of probabilities and v that returns their product.
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
        scores = compute_scores(*tensors)
    probabilities = tf.exp(scores - log_sums)
    with tf.GradientTape() as context_tape:
        context_tape.watch([probabilities, v])
        context = compute_context(probabilities, v)
    dp, dv = context_tape.gradient(context, [probabilities, v], tf.cast(dy, context.dtype))
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
    gradients = []
    for sink in sinks:
        gradient = -tf.exp(sink - log_sums) * means
        axes = [axis for axis, size in enumerate(sink.shape) if size == 1]
        gradients.append(tf.reduce_sum(gradient, axes, keepdims=True))
    return gradients


def block_context(
    probabilities: tf.Tensor,
    v: tf.Tensor,
    dropout_mask: tf.Tensor | None,
    dropout: DropoutMasks | None,
    compute_type: str,
) -> tf.Tensor:
    """Return the contribution of a block of keys to the context, in the compute type.

    Args:
        probabilities: Tensor of shape `[..., n, s, t]`, probabilities or multiples of them.
        v: Tensor of shape `[..., m, t, d]`.
        dropout_mask: Dropout mask, or `None`.
        dropout: The `DropoutMasks` of the mask, or `None`.
        compute_type: Name of the result's type.
    """
    probabilities = tf.cast(probabilities, v.dtype)
    if dropout_mask is not None:
        probabilities = dropout.drop(probabilities, dropout_mask)
    return tf.cast(attention_context(probabilities, v), compute_type)


def pad_positions(length: int, x: tf.Tensor, start: int, end: int) -> tf.Tensor:
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
