"""Attention whose memory grows with the length, not with its square.

References: Rabe and Staats, 2021, "Self-attention does not need O(n²) memory", arXiv 2112.05682;
Dao et al., 2022, "FlashAttention", arXiv 2205.14135, §3.1. Scores are computed for one block of
queries and one of keys at a time, and summed up by an online softmax. The backward pass keeps
queries, keys, values, the context and the logarithm of each query's sum of exponentials, and
computes the scores again. Blocks of which nothing is seen are not computed.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, allowed, expand_mask, is_near, reach
from dtransformer.layers.attention_scores import by_heads, scores_of
from dtransformer.layers.dropout import DropoutMasks
from dtransformer.layers.online_softmax import (
    OnlineSoftmax,
    block_context,
    block_gradients,
    sink_gradients,
    within,
)
from dtransformer.layers.position_bias import PositionBias
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
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    mask: tf.Tensor | Segments | None = None,
    bias: PositionBias | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    dropout: DropoutMasks | None = None,
    softmax_compute_type: str = "float32",
    sinks: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the context of queries; see `attention`. Sums are of float32 at least."""
    compute_type = "float64" if softmax_compute_type == "float64" else "float32"
    if mask is not None and not isinstance(mask, Segments):
        mask = expand_mask(mask)
    blocks = _Blocks(mask, bias, causal, window, soft_cap, dropout, compute_type)
    tensors = [] if bias is None else bias.tensors
    sinks = [] if sinks is None else [tf.cast(by_heads(sinks), compute_type)]

    @custom_gradient
    def attend(q, k, v, *others):
        sinks, tensors = others[:number], others[number:]
        context, log_sums = _forward(blocks, q, k, v, sinks, tensors)

        def gradient(dy):
            return _backward(blocks, q, k, v, sinks, tensors, context, log_sums, dy)

        return context, gradient

    number = len(sinks)
    context = attend(q, k, v, *sinks, *tensors)
    return constrain(context, ("batch", "heads", None, "head_dim"))


def _forward(blocks, q, k, v, sinks, tensors):
    """Return the context, and the logarithms of the sums of exponentials [b, n, s, 1]."""
    contexts, log_sums, parts = [], [], _Parts()
    for row, ((first, last), columns) in enumerate(blocks.rows(q, k)):
        # One block of queries after the other: else all scores could be there at once.
        own = q[:, :, first:last]
        own = after(own, contexts[-1]) if contexts else own
        softmax, kept = OnlineSoftmax(*sinks), blocks.kept(own, row, columns)
        for (start, end), own_kept in zip(columns, kept, strict=True):
            scores = blocks.scores(own, parts(k, start, end), tensors, first, start)
            own_v = parts(v, start, end)
            softmax.add(
                scores, lambda p, own_v=own_v, kept=own_kept: blocks.context(p, own_v, kept)
            )
        context, sums = softmax.results()
        contexts.append(tf.cast(context, q.dtype))
        log_sums.append(sums)
    return joined(contexts, axis=2), joined(log_sums, axis=2)


def _backward(blocks, q, k, v, sinks, tensors, context, log_sums, dy):
    """Return the gradients of q, k, v, the sinks and the tensors."""
    # The softmax's gradient needs the mean of the probabilities' gradients, which is this.
    means = tf.reduce_sum(tf.cast(dy * context, blocks.compute_type), axis=-1, keepdims=True)
    of_q, of_k, of_v, of_tensors = [], tf.zeros_like(k), tf.zeros_like(v), []
    parts = _Parts()
    for row, ((first, last), columns) in enumerate(blocks.rows(q, k)):
        own_q, own_dy, own_sums, own_means = (x[:, :, first:last] for x in (q, dy, log_sums, means))
        # One block of queries after the other; and so TensorFlow does not keep all that is added up.
        own_q, own_dy = after(own_q, of_k if of_q else own_dy), after(own_dy, of_v)
        of_own, kept = [], blocks.kept(own_dy, row, columns)
        for (start, end), own_kept in zip(columns, kept, strict=True):
            (dq, dk, *others), dv = block_gradients(
                lambda q, k, *rest, at=(first, start): blocks.scores(q, k, rest, *at),
                lambda p, v, kept=own_kept: blocks.context(p, v, kept),
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


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What is computed for one block of queries and keys, by the arguments of `attention`."""

    mask: tf.Tensor | Segments | None
    bias: PositionBias | None
    causal: bool
    window: int | None
    soft_cap: float | None
    dropout: DropoutMasks | None
    compute_type: str

    def rows(self, q, k):
        return seen_blocks(q.shape[2], k.shape[2], *reach(self.mask, self.causal, self.window))

    def scores(self, q, k, tensors, first, start):
        """Return the scores of a block, -inf where a query may not attend."""
        s, t = q.shape[2], k.shape[2]
        scores = tf.cast(scores_of(q, k), self.compute_type)
        if self.soft_cap is not None:
            scores = self.soft_cap * tf.tanh(scores / self.soft_cap)
        if self.bias is not None:
            scores += tf.cast(self.bias.block(tensors, first, s, start, t), scores.dtype)
        mask, near = self.mask, None
        if isinstance(mask, Segments):
            mask = mask.block(slice(first, first + s), slice(start, start + t))
        elif mask is not None:
            mask = _block_of(mask, first, s, start, t)
        if not self._are_all_near(first, first + s, start, start + t):
            positions = first + tf.range(s), start + tf.range(t)
            near = is_near(*positions, self.causal, self.window)
        seen = allowed(mask, near)
        if seen is None:
            return scores
        return tf.where(seen, scores, tf.constant(-np.inf, scores.dtype))

    def _are_all_near(self, first, last, start, end):
        if self.causal and first < end - 1:
            return False
        if self.window is None:
            return True
        return last - 1 < start + self.window and (self.causal or end - 1 < first + self.window)

    def kept(self, known, row, columns):
        """Return dropout's masks of the blocks of a row, which are not drawn before `known` is."""
        if self.dropout is None:
            return [None] * len(columns)
        sizes = [end - start for start, end in columns]
        kept = self.dropout.kept(known, row, width=sum(sizes), known=known)
        return [kept] if len(sizes) == 1 else tf.split(kept, sizes, axis=3)

    def context(self, probabilities, v, kept):
        """Return what a block adds to the context; see `block_context`."""
        return block_context(probabilities, v, kept, self.dropout, self.compute_type)


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
