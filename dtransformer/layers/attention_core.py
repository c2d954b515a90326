"""Scaled dot-product attention, and the choice of its implementation."""

import functools
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.attention_mask import Segments, allowed
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.blockwise_attention import ALL_POSITIONS, blockwise_attention
from dtransformer.layers.cudnn_attention import auto_uses_cudnn, cudnn_attention, cudnn_obstacle
from dtransformer.layers.dropout import DropoutMasks
from dtransformer.layers.elementwise import add_to_rows, apply_soft_cap, scale, select
from dtransformer.layers.online_softmax import attention_context, attention_scores, per_head
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.context_parallel.exchange import LocalExchange, context_exchange
from dtransformer.parallel.mesh.axis_rules import constrain_both
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

IMPLEMENTATIONS = "auto", "reference", "blockwise", "cudnn"
# "auto" selects blocks from this number of scores per head.
_MIN_BLOCKWISE_SCORES = 2048 * 1024


def attention(
    q: tf.Tensor,
    keys: list[tf.Tensor],
    values: list[tf.Tensor],
    mask: tf.Tensor | Segments | None = None,
    bias: tf.Tensor | PositionBias | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    dropout: DropoutMasks | None = None,
    softmax_compute_type: str = "float32",
    implementation: str = "auto",
    sinks: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the attention outputs of queries that are already scaled.

    Keys and values may have fewer heads than queries: n / m consecutive query heads share a key and
    value head, which is not repeated in memory
    ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). Masked positions have probability
    exactly 0, and a query with no visible key returns zeros.

    Args:
        q: Tensor of shape `[b, n, s, d]`, scaled.
        keys: List of tensors of shape `[b, m, t, d]` with consecutive positions, so the parts of a
            cache need not be concatenated. m must divide n.
        values: List of tensors of shape `[b, m, t, d]`, one per tensor in `keys`.
        mask: Boolean or 0/1 tensor of shape `[b, t]`, `[b, s, t]`, `[b, 1, t]` or
            `[b, n or 1, s, t]`, 1 where a query may attend; or `Segments`. t counts all positions
            in `keys`. `None` masks nothing (default).
        bias: `PositionBias`, or a tensor of shape `[n or 1, s or 1, t]`, added to scores. A tensor,
            or more than one tensor in `keys`, selects the reference implementation. Defaults to
            `None`.
        causal: Boolean, whether to hide later positions. Queries and keys start at the same
            position. Defaults to `False`.
        window: Integer. Sliding-window size, see `is_near`. `None` disables it (default).
        soft_cap: Float c. Replaces a score x by c·tanh(x / c) before masking
            ([Gemma Team, 2024](https://arxiv.org/abs/2408.00118), section 2). `None` disables it
            (default).
        dropout: `DropoutMasks` of the probabilities, one mask per block of queries, see
            `ContextPlan.seen`. `None` disables dropout (default).
        softmax_compute_type: Type of the softmax. Defaults to `"float32"`.
        implementation: `"reference"` stores all scores. `"blockwise"` stores none and computes them
            again in the backward pass. `"cudnn"` uses cuDNN's fused kernels, or blocks with a
            warning if cuDNN does not support the options. `"auto"` uses cuDNN on GPUs, or warns and
            continues without it, and selects blocks from `_MIN_BLOCKWISE_SCORES` scores per head.
            Sharded sequences use blocks unless the implementation is `"reference"`. Defaults to
            `"auto"`.
        sinks: Tensor of shape `[n]` with one extra score per head. It takes part in the softmax and
            adds nothing to the output ([Xiao et al., 2023](https://arxiv.org/abs/2309.17453),
            section 3.3; gpt-oss). Defaults to `None`.

    Returns:
        A tensor of shape `[b, n, s, d]`.
    """
    options = AttentionOptions(
        mask, bias, causal, window, soft_cap, dropout, softmax_compute_type, sinks
    )
    if len(keys) > 1 or isinstance(bias, tf.Tensor):
        implementation = "reference"
    if implementation != "reference":
        exchange = context_exchange(q, keys[0], options.reach[0], bias is not None)
        if exchange is not None:
            return blockwise_attention(exchange, q, keys[0], values[0], options)
    chosen = implementation_for(implementation, q, keys[0], **vars(options))
    if chosen == "cudnn":
        return cudnn_attention(q, keys[0], values[0], options)
    if chosen == "blockwise":
        exchange = LocalExchange(q.shape[2], keys[0].shape[2])
        return blockwise_attention(exchange, q, keys[0], values[0], options)
    scores = [attention_scores(q, k) for k in keys]
    scores = _concat(scores, axis=-1)
    scores = constrain_both(scores, ("batch", "heads", None, "memory_length"))
    scores = tf.cast(scores, softmax_compute_type)
    if soft_cap is not None:
        scores = apply_soft_cap(scores, soft_cap)
    s, t = static_or_dynamic_shape(scores)[2:]
    if bias is not None:
        if isinstance(bias, PositionBias):
            bias = tf.cast(bias.block(bias.tensors, 0, s, 0, t), scores.dtype)
            scores = add_to_rows(scores, bias)
        else:
            scores += tf.cast(bias, scores.dtype)
    visible = allowed(mask, options.near(tf.range(s), tf.range(t)))
    any_visible = None
    if visible is not None:
        scores = select(visible, scores, scores.dtype.min)
    if mask is not None:
        any_visible = tf.reduce_any(visible, axis=-1, keepdims=True)
    probabilities = tf.cast(tf.nn.softmax(scores), values[0].dtype)
    if dropout is not None:
        probabilities = _drop_by_rows(dropout, probabilities, *options.reach)
    probabilities = [probabilities]
    if len(values) > 1:
        sizes = [static_or_dynamic_shape(v)[2] for v in values]
        probabilities = tf.split(probabilities[0], sizes, axis=-1)
    parts = [attention_context(p, v) for p, v in zip(probabilities, values)]
    context = parts[0] if len(parts) == 1 else tf.add_n(parts)
    if sinks is not None:
        sums = tf.reduce_logsumexp(scores, axis=-1, keepdims=True)
        kept_fraction = tf.sigmoid(sums - tf.cast(per_head(sinks), sums.dtype))
        context *= tf.cast(kept_fraction, context.dtype)
    if any_visible is not None:
        context = scale(context, tf.cast(any_visible, context.dtype))
    return constrain_both(context, ("batch", "heads", None, "head_dim"))


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
    `_MIN_BLOCKWISE_SCORES` scores, otherwise the reference. With an obstacle, `"cudnn"` becomes
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
        is_long = is_known and num_queries * num_keys >= _MIN_BLOCKWISE_SCORES
        return "blockwise" if is_long else "reference"
    return implementation


@functools.cache
def _warn_once(obstacle):
    warnings.warn(f"Attention is computed without cuDNN: {obstacle}.", stacklevel=2)


def _drop_by_rows(dropout, probabilities, causal, window):
    """Drop elements of all probabilities with the masks that blockwise attention would draw."""
    s, t = probabilities.shape[2:]
    spans = []
    if s is not None and t is not None:
        plan = LocalExchange(s, t).plan
        rows = plan.rows(ALL_POSITIONS[0])
        columns = plan.seen(causal, window, ALL_POSITIONS)[0]
        spans = [(row, blocks[0].start, blocks[-1].end) for row, blocks in zip(rows, columns)]
    # A single block needs no slices.
    if len(spans) < 2 and all(span[1:] == (0, t) for span in spans):
        return dropout.drop(probabilities, dropout.kept(probabilities))
    rows = []
    for index, ((first, last), start, end) in enumerate(spans):
        row = probabilities[:, :, first:last]
        visible = row[..., start:end]
        visible = dropout.drop(visible, dropout.kept(visible, index))
        rows.append(
            _concat([x for x in (row[..., :start], visible, row[..., end:]) if x.shape[3]], 3)
        )
    return _concat(rows, axis=2)


def _concat(parts, axis):
    """Concatenate tensors along an axis. A single tensor is returned as is."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=axis)
