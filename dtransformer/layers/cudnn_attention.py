"""Attention by cuDNN's fused kernels, which store no scores.

Reference: [Dao et al., 2022](https://arxiv.org/abs/2205.14135) (FlashAttention), section 3.1

`cudnn_call` describes the calls. XLA compiles them in separate functions, so a step that is not
compiled can use them. Without a GPU, TensorFlow computes the same calls from the same operands.

The kernels handle causal attention and windows if queries and keys have the same positions. Other
masks become a 16-bit bias `[b, 1, s, t]`, which the forward and the backward pass each build again.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.attention_mask import Segments, allowed, is_near
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.cudnn_call import CudnnCall, unsupported_reason
from dtransformer.layers.online_softmax import (
    OnlineSoftmax,
    attention_scores,
    block_context,
    block_gradients,
    mask_scores,
    per_head,
    sink_gradients,
)
from dtransformer.parallel.ops import gpu_calls
from dtransformer.parallel.ops.custom_gradient import custom_gradient

_MAX_MASK_BYTES = 2**30  # bytes
_OPEN_SHAPES = (
    "shapes are unknown (use batches of a fixed size, for example with `drop_remainder=True`)"
)


def cudnn_obstacle(
    queries: Sequence[int | None], keys: Sequence[int | None], dtype: str, options: AttentionOptions
) -> str | None:
    """Return the reason why cuDNN cannot compute an attention, or `None` if it can.

    Args:
        queries: Tuple `(b, n, s, d)`, the shape of queries.
        keys: Tuple `(b, m, t, d)`, the shape of keys and values.
        dtype: Name of their type.
        options: An `AttentionOptions`.

    Returns:
        A clause that completes a warning, or `None`.
    """
    reasons = {
        _OPEN_SHAPES: None in (*queries, *keys),
        "scores have a position bias": options.bias not in (None, False),
        "scores have a soft cap": options.soft_cap is not None,
        "cuDNN cannot reproduce the dropout masks": options.dropout is not None,
        "the softmax is in float64": gpu_calls.takes_gpu_branch()
        and options.softmax_compute_type == "float64",
    }
    reason = gpu_calls.obstacle_to_calls() or next(
        (name for name in reasons if reasons[name]), None
    )
    if reason is not None:
        return reason
    call = _call(queries, keys, dtype, options)
    if call.bias is not None and 2 * math.prod(call.bias) > _MAX_MASK_BYTES:
        return f"the mask would take {2 * math.prod(call.bias) / 2**30:.1f} GiB"
    return unsupported_reason(call) if gpu_calls.takes_gpu_branch() else None


def auto_uses_cudnn() -> bool:
    """Return whether `"auto"` may select cuDNN: only while tracing a function for a GPU."""
    return gpu_calls.takes_gpu_branch() and not tf.executing_eagerly()


def cudnn_attention(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, options: AttentionOptions
) -> tf.Tensor:
    """Return the attention outputs of queries, computed by cuDNN. See `attention`.

    Call it only if `cudnn_obstacle` returns `None`. The kernels do not support sinks. The forward
    pass therefore rescales their results by the larger sum, and the backward pass computes
    probabilities from it.

    Args:
        q: Tensor of shape `[b, n, s, d]`.
        k, v: Tensors of shape `[b, m, t, d]`.
        options: An `AttentionOptions`.

    Returns:
        A tensor of shape `[b, n, s, d]`.
    """
    mask = options.mask
    sinks = options.sinks
    if mask is not None:
        mask = tf.nest.map_structure(_widen_index, mask)
    call = _call(q.shape, k.shape, q.dtype.name, options)
    bias_of = functools.partial(_bias_of, call, options)

    # Operands have the layout [b, s, n, d] in memory, so XLA fuses them with their surroundings.
    @_compiled
    def forward(q, k, v, mask):
        bias, any_visible = bias_of(mask)
        context, log_sums = _forward(call, q, k, v, *bias)
        return _zero_hidden(any_visible, context), log_sums

    @_compiled
    def backward(q, k, v, log_sums, context, dy, mask):
        bias, any_visible = bias_of(mask)
        return _backward(call, q, k, v, log_sums, _zero_hidden(any_visible, dy), *bias, context)

    @custom_gradient
    def attend(q, k, v, *sinks):
        # A tape must not ask for gradients of the compiled functions; they have none.
        q, k, v = (tf.stop_gradient(x) for x in (q, k, v))
        context, log_sums = forward(q, k, v, mask)
        if sinks:
            context, log_sums = _add_sinks(*sinks, context, log_sums)

        def gradient(dy):
            gradients = backward(q, k, v, log_sums, context, dy, mask)
            if not sinks:
                return gradients
            products = tf.cast(_swap_heads(dy * context), log_sums.dtype)
            means = tf.reduce_sum(products, axis=-1, keepdims=True)
            return *gradients, *sink_gradients(sinks, log_sums[..., None], means)

        return context, gradient

    sinks = [] if sinks is None else [tf.cast(per_head(sinks), _sums_type(q))]
    return _swap_heads(attend(*map(_swap_heads, (q, k, v)), *sinks))


def _widen_index(x):
    """Cast int32 to `INDEX_TYPE`: TensorFlow places int32 arguments of functions on the host."""
    if x is None or x.dtype != "int32":
        return x
    return tf.cast(x, gpu_calls.INDEX_TYPE)


def _add_sinks(sinks, context, log_sums):
    """Add sinks `[1, n, 1, 1]` to a context `[b, s, n, d]` and to `log_sums` `[b, n, s]`."""
    with_sinks = log_sums + tf.math.softplus(sinks[..., 0] - log_sums)
    factor = tf.cast(tf.exp(log_sums - with_sinks), context.dtype)
    return context * tf.transpose(factor, [0, 2, 1])[..., None], with_sinks


def _compiled(function: Callable) -> Callable:
    return tf.function(
        function, autograph=False, jit_compile=True if gpu_calls.is_on_gpu() else None
    )


def _call(queries, keys, dtype, options):
    """Return the `CudnnCall` for queries `[b, n, s, d]` and keys `[b, m, t, d]`."""
    (b, n, s, d) = queries
    (_, m, t, _) = keys
    mask = options.mask
    (causal, window) = options.reach
    causal &= s == t
    if mask is not None or not causal:
        window = None
    bias = None
    if mask is not None or (causal, window) != (options.causal, options.window):
        has_heads = mask is not None and not isinstance(mask, Segments) and mask.shape.rank == 4
        bias = (1 if mask is None else b, mask.shape[1] if has_heads else 1, s, t)
    return CudnnCall((b, s, n, d), (b, t, m, d), dtype, causal, window, bias)


def _bias_of(call, options, mask):
    """Return a mask as a bias.

    Returns:
        A `(biases, any_seen)` tuple: a list of one tensor or an empty list, and a bool tensor
        `[b, s, n or 1, 1]`, True for queries that see a key. `None` if all do.
    """
    if call.bias is None:
        return [], None
    s, t = call.bias[2:]
    visible = allowed(mask, options.near(tf.range(s), tf.range(t)))
    hidden = tf.constant(call.masked_score, call.dtype)
    bias = tf.where(tf.broadcast_to(visible, call.bias), tf.zeros([], call.dtype), hidden)
    return [bias], None if mask is None else _swap_heads(
        tf.reduce_any(visible, axis=-1, keepdims=True)
    )


def _zero_hidden(any_visible, x):
    """Return x `[b, s, n, d]` with zeros for queries that see no key."""
    return x if any_visible is None else tf.where(any_visible, x, tf.zeros([], x.dtype))


def _swap_heads(x):
    """Transpose `[b, n, s, d]` to `[b, s, n, d]`, or back."""
    return tf.transpose(x, [0, 2, 1, 3])


def _forward(call, q, k, v, *bias):
    """Return the context `[b, s, n, d]` and the log-sum-exp of the scores `[b, n, s]`."""
    if gpu_calls.is_on_gpu():
        results = [(call.queries, q.dtype), (call.log_sums, tf.float32)]
        return _compat.call_stablehlo(call.forward(), [q, k, v, *bias], results, call.name())
    softmax = OnlineSoftmax()
    v = _swap_heads(v)
    scores = _scores(call, _swap_heads(q), _swap_heads(k), *bias)
    softmax.add(scores, lambda p: block_context(p, v, None, None, scores.dtype))
    context, log_sums = softmax.results()
    return tf.cast(_swap_heads(context), q.dtype), tf.squeeze(log_sums, -1)


def _backward(call, q, k, v, log_sums, dy, *extra):
    """Return the gradients of q, k and v. `others` are the bias, if any, and the context."""
    *bias, context = extra
    if gpu_calls.is_on_gpu():
        operands = [q, k, v, log_sums, dy, *bias, context]
        results = [(call.queries, q.dtype), (call.keys, q.dtype), (call.keys, q.dtype)]
        return _compat.call_stablehlo(call.backward(), operands, results, call.name(True))
    q, k, v, dy, context = (_swap_heads(x) for x in (q, k, v, dy, context))
    wide_dy, wide_context = (tf.cast(x, log_sums.dtype) for x in (dy, context))
    means = tf.reduce_sum(wide_dy * wide_context, axis=-1, keepdims=True)
    (dq, dk), dv = block_gradients(
        lambda q, k: _scores(call, q, k, *bias),
        lambda p, v: block_context(p, v, None, None, log_sums.dtype),
        [q, k],
        v,
        dy,
        log_sums[..., None],
        means,
    )
    return [_swap_heads(x) for x in (dq, dk, dv)]


def _sums_type(q):
    """Return the type of scores and of their log-sum-exp."""
    return "float64" if q.dtype == "float64" else "float32"


def _scores(call, q, k, *bias):
    """Return the scores `[b, n, s, t]` of q `[b, n, s, d]` and k `[b, m, t, d]`, with the bias."""
    scores = attention_scores(q, k)
    scores = tf.cast(scores, _sums_type(q))
    for x in bias:
        scores += tf.cast(x, scores.dtype)
    near = is_near(*(tf.range(n) for n in scores.shape[2:]), call.causal, call.window)
    return mask_scores(scores, near)
