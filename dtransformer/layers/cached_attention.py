"""Attention to a cache: the cache with a new position, and what may be seen of it.

Shapes are those of `decoding.cache`; a prefix has p positions, which all hypotheses of a source share.
With a window of w positions a cache keeps w - 1 of the prefix and w of each hypothesis at most.
"""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, expand_mask, is_near
from dtransformer.layers.position import first_of_segment
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.decoding import cache as kv_cache
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def with_new_position(
    cache: dict,
    k: tf.Tensor,
    v: tf.Tensor,
    mask: tf.Tensor | None,
    prefix_mask: tf.Tensor | None,
    window: int | None,
    bias: PositionBias | None,
) -> tuple[dict, list[tf.Tensor], list[tf.Tensor], tf.Tensor, tf.Tensor | None]:
    """Put the next position into a cache.

    Args:
        cache: as `MultiHeadAttention`'s.
        k, v: tensors [b·k, m, 1, d].
        mask: what may be seen of the entries at all positions, as `MultiHeadAttention`'s; None for
            all.
        prefix_mask: bool tensor [b, p]; None for all.
        window: how many positions are seen; None for all.
        bias: a `PositionBias`, or None.

    Returns:
        The next cache; what the position attends to, keys and values, lists of tensors [b, m, t, d]
        whose t together are those of all entries; a bool mask [b or 1, 1, k or 1, t] of what may be
        seen of them; and the bias [n, 1, t], or None.

    Raises:
        ValueError: there are several positions.
    """
    b, _, size, _ = static_or_dynamic_shape(cache["key"])
    if k.shape[2] not in (None, 1):
        raise ValueError(f"a cache takes one position a call, got {k.shape[2]}")
    hypotheses, index = static_or_dynamic_shape(k)[0] // b, cache["index"]
    key, value = kv_cache.put([cache["key"], cache["value"]], [k, v], index)
    extended = {**cache, "key": key, "value": value, "index": index + 1}
    entries, new = [[key], [value]], tf.reshape(index, [1])
    # All of these are near: there is room for as many as a window sees.
    positions = kv_cache.positions_of(size, index, hypotheses)
    seen = (positions >= 0)[None, None, None, :]
    if mask is not None:
        mask = expand_mask(mask)
        if window is not None:
            places = tf.range(size) % hypotheses + tf.maximum(positions, 0) * hypotheses
            mask = tf.gather(mask, places, axis=3)
        seen &= mask
    if "prefix_key" in cache:
        length = static_or_dynamic_shape(cache["prefix_key"])[2]
        places = tf.range(length) - length
        near = is_near(new, places, causal=True, window=window)[None, None, :, :]
        if prefix_mask is not None:
            first = static_or_dynamic_shape(prefix_mask)[1] - length
            near &= expand_mask(prefix_mask[:, first:])
        parts = [(near, length), (seen, size)]
        seen = tf.concat([tf.broadcast_to(x, [b, 1, hypotheses, t]) for x, t in parts], axis=-1)
        positions = tf.concat([places, positions], 0)
        before = cache["prefix_key"], cache["prefix_value"]
        entries = [[x, *own] for x, own in zip(before, entries, strict=True)]
    if bias is not None:
        bias = bias.of_positions(new, positions)
    return extended, *entries, seen, bias


def of_prefix(k: tf.Tensor, v: tf.Tensor, window: int | None) -> dict:
    """Return what a cache keeps of the beginning of a sequence.

    Args:
        k, v: tensors [b, m, p, d].
        window: how many positions are seen: what comes next sees one less of them; None for all.
    """
    if window is None:
        return {"prefix_key": k, "prefix_value": v}
    length = static_or_dynamic_shape(k)[2]
    most = max if isinstance(length, int) else tf.maximum
    first = most(length - (window - 1), 0)
    kept = {"prefix_key": k[:, :, first:], "prefix_value": v[:, :, first:]}
    return {**kept, "prefix_length": tf.constant(length) if most is max else length}


def prefix_length(cache: dict) -> int | tf.Tensor:
    """Return the number p of positions before a cache's own, those that it no longer keeps, too."""
    if "prefix_length" in cache:
        return cache["prefix_length"]
    return static_or_dynamic_shape(cache["prefix_key"])[2] if "prefix_key" in cache else 0


def next_positions(
    q: tf.Tensor,
    cache: dict | None,
    mask: tf.Tensor | Segments | None,
    prefix_mask: tf.Tensor | None,
    in_texts: bool,
) -> tf.Tensor:
    """Return the position of each query, from 0: int [b·k or 1, s].

    Those in a text begin anew in each of the texts that are packed into a row, and after the padding
    on the left of those that are continued. Without a cache padding counts, as in `transformers`.

    Args:
        q: tensor [b·k, n, s, d].
        cache: as `MultiHeadAttention`'s: an empty dict where texts [b, s] begin; None for none.
        mask: as `MultiHeadAttention`'s.
        prefix_mask: bool tensor [b, p]; None for all.
        in_texts: whether they are those in a text; else in a row, where their distance alone counts.
    """
    rows, _, length, _ = static_or_dynamic_shape(q)
    positions = tf.range(length)[None]
    if cache and in_texts and prefix_mask is not None:
        size = static_or_dynamic_shape(prefix_mask)[0]
        return positions + cache["index"] + tf.repeat(_count(prefix_mask), rows // size)[:, None]
    if cache:
        return positions + cache["index"] + prefix_length(cache)
    if in_texts and isinstance(mask, Segments):
        if cache is not None:
            return positions - _count(~tf.cast(mask.queries, "bool"))[:, None]
        if not mask.queries.dtype.is_bool:
            return positions - first_of_segment(mask.queries)
    return positions


def _count(mask):
    return tf.reduce_sum(tf.cast(mask, "int32"), axis=1)
