"""Attention with a cache: insert a position, and find the visible entries.

See `decoding.cache` for the letters in shapes. A prefix has p positions, shared by all hypotheses
of a source. With a window of w positions, a cache stores at most w − 1 positions of the prefix and
w of each hypothesis.
"""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, expand_mask, is_near
from dtransformer.layers.position import segment_starts
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.decoding import cache as kv_cache
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def insert_position(
    cache: dict,
    k: tf.Tensor,
    v: tf.Tensor,
    mask: tf.Tensor | None,
    prefix_mask: tf.Tensor | None,
    window: int | None,
    bias: PositionBias | None,
) -> tuple[dict, list[tf.Tensor], list[tf.Tensor], tf.Tensor, tf.Tensor | None]:
    """Insert the next position into a cache.

    Args:
        cache: Dictionary, see `MultiHeadAttention`.
        k, v: Tensors of shape `[b·k, m, 1, d]`.
        mask: Mask of all entries, see `MultiHeadAttention`, or `None`.
        prefix_mask: Bool tensor of shape `[b, p]`, or `None`.
        window: Integer. Number of visible positions. `None` shows all.
        bias: `PositionBias`, or `None`.

    Returns:
        A `(cache, keys, values, visible, bias)` tuple. `keys` and `values` are lists of tensors
        `[b, m, t, d]`, prefix first. With t summed over the list, `visible` is a bool tensor
        `[b or 1, 1, k or 1, t]`, and `bias` a tensor `[n, 1, t]` or `None`.

    Raises:
        ValueError: If `k` has more than one position.
    """
    b, _, size, _ = static_or_dynamic_shape(cache["key"])
    if k.shape[2] not in (None, 1):
        raise ValueError(f"A cache accepts one position per call, got {k.shape[2]}.")
    hypotheses = static_or_dynamic_shape(k)[0] // b
    index = cache["index"]
    key, value = kv_cache.put([cache["key"], cache["value"]], [k, v], index)
    new_cache = {**cache, "key": key, "value": value, "index": index + 1}
    entries = [[key], [value]]
    position = tf.reshape(index, [1])
    # The cache has room for a single window, so all entries are in reach.
    positions = kv_cache.positions_of(size, index, hypotheses)
    visible = (positions >= 0)[None, None, None, :]
    if mask is not None:
        mask = expand_mask(mask)
        if window is not None:
            places = tf.range(size) % hypotheses + tf.maximum(positions, 0) * hypotheses
            mask = tf.gather(mask, places, axis=3)
        visible &= mask
    if "prefix_key" in cache:
        length = static_or_dynamic_shape(cache["prefix_key"])[2]
        places = tf.range(length) - length
        near = is_near(position, places, causal=True, window=window)[None, None, :, :]
        if prefix_mask is not None:
            first = static_or_dynamic_shape(prefix_mask)[1] - length
            near &= expand_mask(prefix_mask[:, first:])
        parts = [(near, length), (visible, size)]
        visible = tf.concat([tf.broadcast_to(x, [b, 1, hypotheses, t]) for x, t in parts], axis=-1)
        positions = tf.concat([places, positions], 0)
        prefix = cache["prefix_key"], cache["prefix_value"]
        entries = [[x, *entry] for x, entry in zip(prefix, entries, strict=True)]
    if bias is not None:
        bias = bias.at_positions(position, positions)
    return new_cache, *entries, visible, bias


def prefix_cache(k: tf.Tensor, v: tf.Tensor, window: int | None) -> dict:
    """Return the cache entries of the beginning of a sequence.

    Args:
        k, v: Tensors of shape `[b, m, p, d]`.
        window: Integer. Number of visible positions. Only the last `window - 1` are stored, since
            the next query is one of them. `None` stores all.

    Returns:
        A dictionary with `"prefix_key"`, `"prefix_value"` and, with a window, `"prefix_length"`.
    """
    if window is None:
        return {"prefix_key": k, "prefix_value": v}
    length = static_or_dynamic_shape(k)[2]
    maximum = max if isinstance(length, int) else tf.maximum
    first = maximum(length - (window - 1), 0)
    kept = {"prefix_key": k[:, :, first:], "prefix_value": v[:, :, first:]}
    return {**kept, "prefix_length": tf.constant(length) if maximum is max else length}


def prefix_length(cache: dict) -> int | tf.Tensor:
    """Return the number p of prefix positions, including positions that a window has removed."""
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
    """Return the position of each query, from 0.

    With `in_texts`, positions restart in each packed sequence, and a continued sequence starts
    after its left padding. Without a cache, padding is counted, as in `transformers`.

    Args:
        q: Tensor of shape `[b·k, n, s, d]`.
        cache: Dictionary, see `MultiHeadAttention`. Empty at the beginning of sequences, or `None`
            without a cache.
        mask: Mask, see `MultiHeadAttention`.
        prefix_mask: Bool tensor of shape `[b, p]`, or `None`.
        in_texts: Boolean, whether positions count from the start of each sequence instead of the
            start of the row. Rotary embeddings usually depend only on distances and do not need it.

    Returns:
        An integer tensor of shape `[b·k or 1, s]`.
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
            return positions - segment_starts(mask.queries)
    return positions


def _count(mask):
    return tf.reduce_sum(tf.cast(mask, "int32"), axis=1)
