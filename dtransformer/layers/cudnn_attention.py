"""Attention by cuDNN's fused kernels, which store no scores.

Reference: [Dao et al., 2022](https://arxiv.org/abs/2205.14135) (FlashAttention), section 3.1

`cudnn_call` describes the calls. XLA compiles them in separate functions, so a step that is not
compiled can use them. Without a GPU, TensorFlow computes the same calls from the same operands.

The kernels handle causal attention and windows if queries and keys have the same positions. Other
masks become a 16-bit bias `[b, 1, s, t]`, and position biases `[b or 1, n, s, t]`, which the forward
and the backward pass each build again. On a mesh each device calls cuDNN for its rows and heads.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import tensorflow as tf

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
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.mesh.axis_rules import constrain, constrain_both
from dtransformer.parallel.mesh.local_calls import call_on_shards, local_shape
from dtransformer.parallel.ops import gpu_calls
from dtransformer.parallel.ops.custom_gradient import custom_gradient

_MAX_BIAS_BYTES = 2**30  # bytes
_OPEN_SHAPES = (
    "shapes are unknown (use batches of a fixed size, for example with `drop_remainder=True`)"
)
# Logical axes of operands and results: [b, s, n, d], [b, n, s, t] and [b, n, s].
_POSITIONS_FIRST = "batch", None, "heads", None
_HEADS_FIRST = "batch", "heads", None, None
_SUMS = "batch", "heads", None


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
    call = _local(_call(queries, keys, dtype, options))
    if queries[1] // call.queries[2] != keys[1] // call.keys[2]:
        return f"the mesh cannot divide {keys[1]} key and value heads"
    if call.bias is not None and 2 * math.prod(call.bias) > _MAX_BIAS_BYTES:
        return f"the mask or bias would take {2 * math.prod(call.bias) / 2**30:.1f} GiB"
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
    if mask is not None:
        mask = tf.nest.map_structure(_widen_index, mask)
    call = _call(q.shape, k.shape, q.dtype.name, options)
    sinks = [] if options.sinks is None else [tf.cast(per_head(options.sinks), _sums_type(q))]
    tables = options.bias.tensors if options.bias else []
    position_bias = functools.partial(_position_bias, call, options)
    mask_and_bias = functools.partial(_mask_and_bias, call, options)

    # Operands have the layout [b, s, n, d] in memory, so XLA fuses them with their surroundings.
    @gpu_calls.compiled
    def forward(q, k, v, mask, tables):
        bias, visible_rows, visible_queries = mask_and_bias(mask, position_bias(tables))
        context, log_sums = _forward(call, q, k, _zero_hidden(visible_rows, v), *bias)
        return _zero_hidden(visible_queries, context), log_sums

    @gpu_calls.compiled
    def backward(q, k, v, log_sums, context, dy, mask, tables):
        with tf.GradientTape() as tape:
            tape.watch(tables)
            values = position_bias(tables)
        bias, visible_rows, visible_queries = mask_and_bias(mask, values)
        v = _zero_hidden(visible_rows, v)
        dy = _zero_hidden(visible_queries, dy)
        dq, dk, dv, *dbias = _backward(call, q, k, v, log_sums, dy, *bias, context)
        gradients = [dq, dk, _zero_hidden(visible_rows, dv)]
        if not tables:
            return gradients
        (dbias,) = dbias
        dvalues = tf.reduce_sum(tf.cast(dbias, values.dtype), axis=0)
        return [*gradients, *tape.gradient(values, tables, dvalues)]

    @custom_gradient
    def attend(q, k, v, *rest):
        # A tape must not ask for gradients of the compiled functions; they have none.
        q, k, v, *rest = (tf.stop_gradient(x) for x in (q, k, v, *rest))
        sinks = rest[:num_sinks]
        tables = rest[num_sinks:]
        context, log_sums = forward(q, k, v, mask, tables)
        if sinks:
            context, log_sums = _add_sinks(*sinks, context, log_sums)

        def gradient(dy):
            dy = constrain(dy, _POSITIONS_FIRST)
            dq, dk, dv, *dtables = backward(q, k, v, log_sums, context, dy, mask, tables)
            dsinks = []
            if sinks:
                products = tf.cast(_swap_heads(dy * context), log_sums.dtype)
                means = tf.reduce_sum(products, axis=-1, keepdims=True)
                dsinks = sink_gradients(sinks, log_sums[..., None], means)
            return dq, dk, dv, *dsinks, *dtables

        return context, gradient

    num_sinks = len(sinks)
    # DTensor cannot transpose and communicate in one operation.
    q, k, v = (constrain_both(x, _HEADS_FIRST) for x in (q, k, v))
    q, k, v = (constrain_both(_swap_heads(x), _POSITIONS_FIRST) for x in (q, k, v))
    context = constrain_both(attend(q, k, v, *sinks, *tables), _POSITIONS_FIRST)
    return constrain_both(_swap_heads(context), _HEADS_FIRST)


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


def _call(queries, keys, dtype, options):
    """Return the `CudnnCall` for queries `[b, n, s, d]` and keys `[b, m, t, d]`."""
    (b, n, s, d) = queries
    (_, m, t, _) = keys
    mask = options.mask
    (causal, window) = options.reach
    causal &= s == t
    has_bias = options.bias is not None and options.bias is not False
    if mask is not None or has_bias or not causal:
        window = None
    bias = None
    if mask is not None or has_bias or (causal, window) != (options.causal, options.window):
        mask_rank = 0 if mask is None or isinstance(mask, Segments) else mask.shape.rank
        heads = n if has_bias else 1
        if mask_rank == 4:
            heads = max(heads, mask.shape[1])
        rows = 1 if mask is None else b
        if mask is None and gpu_calls.is_on_gpu():
            # Each device of a mesh sums the bias gradient over its rows.
            rows = b // local_shape((b,), ("batch",))[0]
        bias = (rows, heads, s, t)
    is_trained = isinstance(options.bias, PositionBias) and bool(options.bias.tensors)
    return CudnnCall((b, s, n, d), (b, t, m, d), dtype, causal, window, bias, is_trained)


def _local(call):
    """Return the call of one device of a mesh, which has a shard of the batch and the heads."""
    bias = None if call.bias is None else local_shape(call.bias, _HEADS_FIRST)
    queries, keys = (local_shape(shape, _POSITIONS_FIRST) for shape in (call.queries, call.keys))
    return dataclasses.replace(call, queries=queries, keys=keys, bias=bias)


def _position_bias(call, options, tables):
    """Return the position bias `[n, s, t]`, computed from its tables, or `None`."""
    if not options.bias:
        return None
    s, t = call.bias[2:]
    return constrain_both(options.bias.block(tables, 0, s, 0, t), ("heads", None, None))


def _mask_and_bias(call, options, mask, position_bias):
    """Return a mask and a position bias `[n, s, t]` as a bias of the call.

    Returns:
        A `(biases, visible_rows, visible_queries)` tuple: a list of one tensor or an empty list, and
        bool tensors `[b, 1, 1, 1]` and `[b, s, n or 1, 1]`, True for queries that see a key. One or
        both are `None`. The first is given if either all queries of a sequence see a key or no query
        does. Zeroed values then make their context 0, and XLA computes them together with the values.
    """
    if call.bias is None:
        return [], None, None
    s, t = call.bias[2:]
    bias = tf.zeros([1, 1, 1, 1], call.dtype)
    if position_bias is not None:
        # DTensor cannot index sharded tensors with `None`.
        bias = tf.cast(tf.expand_dims(position_bias, 0), call.dtype)
    visible = None
    near = options.near(tf.range(s), tf.range(t))
    if mask is not None or (call.causal, call.window) != (options.causal, options.window):
        visible = allowed(mask, near)
    if visible is not None:
        bias = tf.where(visible, bias, tf.constant(call.masked_score, call.dtype))
    biases = [constrain(tf.broadcast_to(bias, call.bias), _HEADS_FIRST)]
    if mask is None:
        return biases, None, None
    any_visible = _swap_heads(tf.reduce_any(visible, axis=-1, keepdims=True))
    if any_visible.shape[1:] == [1, 1, 1]:
        return biases, any_visible, None
    return biases, None, any_visible


def _zero_hidden(visible, x):
    """Return x `[b, s, n, d]` with zeros where `visible` is False."""
    return x if visible is None else tf.where(visible, x, tf.zeros([], x.dtype))


def _swap_heads(x):
    """Transpose `[b, n, s, d]` to `[b, s, n, d]`, or back."""
    return tf.transpose(x, [0, 2, 1, 3])


def _forward(call, q, k, v, *bias):
    """Return the context `[b, s, n, d]` and the log-sum-exp of the scores `[b, n, s]`."""
    if gpu_calls.is_on_gpu():
        operands = [*((x, _POSITIONS_FIRST) for x in (q, k, v)), *((x, _HEADS_FIRST) for x in bias)]
        like_sums = tf.cast(tf.transpose(q[..., 0], [0, 2, 1]), "float32")
        results = [(q, _POSITIONS_FIRST), (like_sums, _SUMS)]
        return call_on_shards(_local(call).forward(), operands, results, call.name())
    softmax = OnlineSoftmax()
    v = _swap_heads(v)
    scores = _scores(call, _swap_heads(q), _swap_heads(k), *bias)
    softmax.add(scores, lambda p: block_context(p, v, None, None, scores.dtype))
    context, log_sums = softmax.results()
    return tf.cast(_swap_heads(context), q.dtype), tf.squeeze(log_sums, -1)


def _backward(call, q, k, v, log_sums, dy, *extra):
    """Return the gradients of q, k, v and, if requested, of the bias.

    Args:
        extra: The bias, if any, and the context.
    """
    *bias, context = extra
    if gpu_calls.is_on_gpu():
        inputs = [(x, _POSITIONS_FIRST) for x in (q, k, v)]
        biases = [(x, _HEADS_FIRST) for x in bias]
        operands = [
            *inputs,
            (log_sums, _SUMS),
            (dy, _POSITIONS_FIRST),
            *biases,
            (context, _POSITIONS_FIRST),
        ]
        results = [*inputs, *biases] if call.bias_gradient else inputs
        return call_on_shards(_local(call).backward(), operands, results, call.name(True))
    q, k, v, dy, context = (_swap_heads(x) for x in (q, k, v, dy, context))
    wide_dy, wide_context = (tf.cast(x, log_sums.dtype) for x in (dy, context))
    means = tf.reduce_sum(wide_dy * wide_context, axis=-1, keepdims=True)
    bias_inputs = bias if call.bias_gradient else []
    (dq, dk, *dbias), dv = block_gradients(
        lambda q, k, *_: _scores(call, q, k, *bias),
        lambda p, v: block_context(p, v, None, None, log_sums.dtype),
        [q, k, *bias_inputs],
        v,
        dy,
        log_sums[..., None],
        means,
    )
    return [*(_swap_heads(x) for x in (dq, dk, dv)), *dbias]


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
