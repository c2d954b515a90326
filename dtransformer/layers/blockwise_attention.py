"""Attention whose memory grows with the length, not with its square.

References: Rabe and Staats, 2021, "Self-attention does not need O(n²) memory", arXiv 2112.05682;
Dao et al., 2022, "FlashAttention", arXiv 2205.14135, §3.1. Scores are computed for one block of
queries and one of keys at a time, and summed up by an online softmax. The backward pass keeps
queries, keys, values, the context and the logarithm of each query's sum of exponentials, and
computes the scores again. Blocks of which nothing is seen are not computed.
"""

import dataclasses

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, allowed, expand_mask
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.attention_scores import where_seen
from dtransformer.layers.online_softmax import (
    OnlineSoftmax,
    block_gradients,
    sink_gradients,
    within,
)
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.dependences import after

# Positions of a block: products of fewer are slower, scores of more are not in the cache.
_QUERIES, _KEYS = 512, 2048

Range = tuple[int, int]


def seen_blocks(
    num_queries: int, num_keys: int, causal: bool, window: int | None
) -> list[tuple[Range, list[Range]]]:
    """Return the blocks of scores [s, t] of which something may be seen; see `is_near`.

    Returns:
        A list, for each block of queries, of its range of positions, and the list of the ranges of
        keys, one after the other.
    """
    rows = []
    for first, last in _ranges(0, num_queries, _QUERIES):
        start, end = 0, num_keys
        if causal:
            end = min(end, last)
        if window is not None:
            start = max(start, first - window + 1)
            end = min(end, last + window - 1)
        rows.append(((first, last), _ranges(start, max(end, start + 1), _KEYS)))
    return rows


def _ranges(start, end, size):
    return [(first, min(first + size, end)) for first in range(start, end, size)]


def blockwise_attention(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, options: AttentionOptions
) -> tf.Tensor:
    """Return the context of queries; see `attention`. Sums are of float32 at least."""
    mask = options.mask
    if mask is not None and not isinstance(mask, Segments):
        options = dataclasses.replace(options, mask=expand_mask(mask))
    sinks, tensors = options.differentiated

    @custom_gradient
    def attend(q, k, v, *others):
        sinks, tensors = others[:number], others[number:]
        context, log_sums = _forward(options, q, k, v, sinks, tensors)

        def gradient(dy):
            return _backward(options, q, k, v, sinks, tensors, context, log_sums, dy)

        return context, gradient

    number = len(sinks)
    context = attend(q, k, v, *sinks, *tensors)
    return constrain(context, ("batch", "heads", None, "head_dim"))


def _forward(options, q, k, v, sinks, tensors):
    """Return the context, and the logarithms of the sums of exponentials [b, n, s, 1]."""
    contexts, log_sums, parts = [], [], _Parts()
    for row, ((first, last), columns) in enumerate(_rows(options, q, k)):
        # One block of queries after the other: else all scores could be there at once.
        own = q[:, :, first:last]
        own = after(own, contexts[-1]) if contexts else own
        softmax, kept = OnlineSoftmax(*sinks), options.kept(own, row, _sizes(columns))
        for (start, end), own_kept in zip(columns, kept, strict=True):
            scores = _scores(options, own, parts(k, start, end), tensors, first, start)
            own_v = parts(v, start, end)
            softmax.add(
                scores, lambda p, own_v=own_v, kept=own_kept: options.context(p, own_v, kept)
            )
        context, sums = softmax.results()
        contexts.append(tf.cast(context, q.dtype))
        log_sums.append(sums)
    return joined(contexts, axis=2), joined(log_sums, axis=2)


def _backward(options, q, k, v, sinks, tensors, context, log_sums, dy):
    """Return the gradients of q, k, v, the sinks and the tensors."""
    # The softmax's gradient needs the mean of the probabilities' gradients, which is this.
    means = tf.reduce_sum(tf.cast(dy * context, options.compute_type), axis=-1, keepdims=True)
    of_q, of_k, of_v, of_tensors = [], tf.zeros_like(k), tf.zeros_like(v), []
    parts = _Parts()
    for row, ((first, last), columns) in enumerate(_rows(options, q, k)):
        own_q, own_dy, own_sums, own_means = (x[:, :, first:last] for x in (q, dy, log_sums, means))
        # One block of queries after the other; and so TensorFlow does not keep all that is added up.
        own_q, own_dy = after(own_q, of_k if of_q else own_dy), after(own_dy, of_v)
        of_own, kept = [], options.kept(own_dy, row, _sizes(columns))
        for (start, end), own_kept in zip(columns, kept, strict=True):
            (dq, dk, *others), dv = block_gradients(
                lambda q, k, *rest, at=(first, start): _scores(options, q, k, rest, *at),
                lambda p, v, kept=own_kept: options.context(p, v, kept),
                [own_q, parts(k, start, end), *tensors],
                parts(v, start, end),
                own_dy,
                own_sums,
                own_means,
            )
            of_own.append(dq)
            of_k += within(k.shape[2], dk, start, end)
            of_v += within(v.shape[2], dv, start, end)
            of_tensors = [x + y for x, y in zip(of_tensors, others)] or others
        of_q.append(tf.add_n(of_own))
    of_sinks = sink_gradients(sinks, log_sums, means)
    return joined(of_q, axis=2), of_k, of_v, *of_sinks, *of_tensors


def _rows(options, q, k):
    return seen_blocks(q.shape[2], k.shape[2], *options.reach)


def _sizes(columns):
    return [end - start for start, end in columns]


def _scores(options, q, k, tensors, first, start):
    """Return the scores of a block, -∞ where a query may not attend."""
    s, t = q.shape[2], k.shape[2]
    scores, mask, near = options.scores(q, k), options.mask, None
    if options.bias is not None:
        scores += tf.cast(options.bias.block(tensors, first, s, start, t), scores.dtype)
    if isinstance(mask, Segments):
        mask = mask.block(slice(first, first + s), slice(start, start + t))
    elif mask is not None:
        mask = _block_of(mask, first, s, start, t)
    if not _are_all_near(options, first, first + s, start, start + t):
        near = options.near(first + tf.range(s), start + tf.range(t))
    return where_seen(scores, allowed(mask, near))


def _are_all_near(options, first, last, start, end):
    causal, window = options.causal, options.window
    if causal and first < end - 1:
        return False
    return window is None or (last - 1 < start + window and (causal or end - 1 < first + window))


def _block_of(x, first, s, start, t):
    """Return the part [..., s or 1, t] of a tensor that has all positions, or one for all."""
    if x.shape[-2] != 1:
        x = x[..., first : first + s, :]
    return x[..., start : start + t]


class _Parts:
    """Positions of keys and values, each range taken once."""

    def __init__(self):
        self._taken = {}

    def __call__(self, x, start, end):
        key = id(x), start, end
        if key not in self._taken:
            self._taken[key] = x[:, :, start:end]
        return self._taken[key]


def joined(parts: list[tf.Tensor], axis: int) -> tf.Tensor:
    """Return tensors, or the only one, as one along an axis."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=axis)
