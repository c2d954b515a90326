"""Scaled dot-product attention, and the choice of its implementation."""

import functools
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.attention_dropout import AttentionDropout
from dtransformer.layers.attention_mask import allowed
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.blockwise_attention import blockwise_attention
from dtransformer.layers.cudnn_attention import auto_uses_cudnn, cudnn_attention, cudnn_obstacle
from dtransformer.layers.elementwise import add_to_rows, apply_soft_cap, scale, select
from dtransformer.layers.online_softmax import attention_context, attention_scores, per_head
from dtransformer.layers.position_bias import PositionBias
from dtransformer.limits import MIN_BLOCKWISE_SCORES
from dtransformer.parallel.context_parallel.exchange import LocalExchange, context_exchange
from dtransformer.parallel.mesh.axis_rules import constrain, constrain_both
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

IMPLEMENTATIONS = "auto", "reference", "blockwise", "cudnn"


def attention(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, implementation: str = "auto", **options
) -> tf.Tensor:
    """Return the attention outputs of queries that are already scaled.

    Keys and values may have fewer heads than queries: n / m consecutive query heads share a key and
    value head, which is not repeated in memory
    ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). Masked positions have probability
    exactly 0, and a query with no visible key returns zeros.

    Args:
        q: Tensor of shape `[b, n, s, d]`, scaled.
        k, v: Tensors of shape `[b, m, t, d]`. m must divide n.
        implementation: `"reference"` stores all scores. `"blockwise"` stores none and computes them
            again in the backward pass. `"cudnn"` uses cuDNN's fused kernels, or blocks with a
            warning if cuDNN does not support the options. `"auto"` uses cuDNN on GPUs, or warns and
            continues without it, and selects blocks from `MIN_BLOCKWISE_SCORES` scores per head.
            Sharded sequences use blocks unless the implementation is `"reference"`. Defaults to
            `"auto"`.
        **options: Fields of `AttentionOptions`.

    Returns:
        A tensor of shape `[b, n, s, d]`.
    """
    options = AttentionOptions(**options)
    if implementation != "reference":
        exchange = context_exchange(q, k, options.reach[0], options.bias is not None)
        if exchange is not None:
            return blockwise_attention(exchange, q, k, v, options)
    chosen = implementation_for(implementation, q, k, **vars(options))
    if chosen == "cudnn":
        return cudnn_attention(q, k, v, options)
    if chosen == "blockwise":
        return blockwise_attention(LocalExchange(q.shape[2], k.shape[2]), q, k, v, options)
    return reference_attention(q, [k], [v], options)


def reference_attention(
    q: tf.Tensor, keys: list[tf.Tensor], values: list[tf.Tensor], options: AttentionOptions
) -> tf.Tensor:
    """Return the attention outputs of queries. All scores are stored for the backward pass.

    Args:
        q: Tensor of shape `[b, n, s, d]`, scaled.
        keys: List of tensors of shape `[b, m, t, d]` with consecutive positions, so the parts of a
            cache need not be concatenated.
        values: List of tensors of shape `[b, m, t, d]`, one per tensor in `keys`.
        options: `AttentionOptions`. Masks and biases count the positions of all tensors in `keys`.

    Returns:
        A tensor of shape `[b, n, s, d]`.
    """
    scores = _reference_scores(q, keys, options)
    s, t = static_or_dynamic_shape(scores)[2:]
    visible = allowed(options.mask, options.near(tf.range(s), tf.range(t)))
    if visible is not None:
        scores = select(visible, scores, scores.dtype.min)
    probabilities = tf.cast(tf.nn.softmax(scores), values[0].dtype)
    if options.dropout is not None:
        shape = static_or_dynamic_shape(probabilities)
        mask = AttentionDropout(options.dropout, shape).all()
        # Each device stores the mask of its heads only.
        mask = constrain(mask, ("batch", "heads", None, "memory_length"))
        probabilities = options.dropout.drop(probabilities, mask)
    context = _weighted_sum(probabilities, values)
    if options.sinks is not None:
        sums = tf.reduce_logsumexp(scores, axis=-1, keepdims=True)
        kept_fraction = tf.sigmoid(sums - tf.cast(per_head(options.sinks), sums.dtype))
        context *= tf.cast(kept_fraction, context.dtype)
    if options.mask is not None:
        any_visible = tf.reduce_any(visible, axis=-1, keepdims=True)
        context = scale(context, tf.cast(any_visible, context.dtype))
    return constrain_both(context, ("batch", "heads", None, "head_dim"))


def _reference_scores(q, keys, options):
    """Return all scores `[b, n, s, t]` in the softmax type, with soft cap and bias."""
    scores = _concat([attention_scores(q, k) for k in keys], axis=-1)
    scores = constrain_both(scores, ("batch", "heads", None, "memory_length"))
    scores = tf.cast(scores, options.softmax_compute_type)
    if options.soft_cap is not None:
        scores = apply_soft_cap(scores, options.soft_cap)
    bias = options.bias
    if bias is None:
        return scores
    if not isinstance(bias, PositionBias):
        return scores + tf.cast(bias, scores.dtype)
    s, t = static_or_dynamic_shape(scores)[2:]
    bias = tf.cast(bias.block(bias.tensors, 0, s, 0, t), scores.dtype)
    return add_to_rows(scores, bias)


def _weighted_sum(probabilities, values):
    """Return the sum of all values, weighted by probabilities `[b, n, s, t]`."""
    if len(values) == 1:
        return attention_context(probabilities, values[0])
    sizes = [static_or_dynamic_shape(v)[2] for v in values]
    parts = tf.split(probabilities, sizes, axis=-1)
    return tf.add_n([attention_context(p, v) for p, v in zip(parts, values, strict=True)])


def implementation_for(implementation: str, q: tf.Tensor, k: tf.Tensor, **options) -> str:
    """Return the implementation of an attention: `"reference"`, `"blockwise"` or `"cudnn"`.

    cuDNN is selected if it supports the options and is requested, or on GPUs if `implementation` is
    `"auto"`. `chosen_implementation` decides all other cases.

    Args:
        implementation: Requested implementation, see `attention`.
        q, k: Tensors or tensor specs of shape `[b, n, s, d]` and `[b, m, t, d]`.
        **options: Fields of `AttentionOptions`.
    """
    reason = None
    if implementation == "cudnn" or (implementation == "auto" and auto_uses_cudnn()):
        reason = cudnn_obstacle(q.shape, k.shape, q.dtype.name, AttentionOptions(**options))
        if reason is None:
            return "cudnn"
    return chosen_implementation(implementation, q.shape[2], k.shape[2], reason)


def chosen_implementation(
    implementation: str, num_queries: int | None, num_keys: int | None, obstacle: str | None = None
) -> str:
    """Return the implementation of an attention: `"reference"`, `"blockwise"` or `"cudnn"`.

    `"auto"` selects blocks if both lengths are known and a head has at least
    `MIN_BLOCKWISE_SCORES` scores, otherwise the reference. With an obstacle, `"cudnn"` becomes
    blocks, or the reference for unknown lengths, and a warning is shown once. Other requests are
    returned as they are.

    Args:
        implementation: Requested implementation, see `attention`.
        num_queries, num_keys: Sequence lengths s and t, or `None` if unknown.
        obstacle: String. Reason why cuDNN cannot compute the attention. Defaults to `None`.

    Raises:
        ValueError: If `"blockwise"` is requested and a length is unknown.
    """
    is_known = num_queries is not None and num_keys is not None
    if obstacle is not None:
        if not _compat.in_symbolic_scope():  # Symbolic shapes are still unknown.
            _warn_once(obstacle)
        if implementation == "cudnn":
            implementation = "blockwise" if is_known else "reference"
    if implementation == "blockwise" and not is_known:
        raise ValueError(
            "`implementation='blockwise'` requires known sequence lengths. Use batches of a fixed "
            "length or `implementation='auto'`."
        )
    if implementation == "auto":
        is_long = is_known and num_queries * num_keys >= MIN_BLOCKWISE_SCORES
        return "blockwise" if is_long else "reference"
    return implementation


@functools.cache
def _warn_once(obstacle):
    warnings.warn(f"Attention is computed without cuDNN: {obstacle}.", stacklevel=2)


def _concat(parts, axis):
    """Concatenate tensors along an axis. A single tensor is returned as is."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=axis)
