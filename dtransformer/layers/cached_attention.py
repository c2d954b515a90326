"""Attention to a cache: the cache with new positions, and what may be seen of it.

Shapes are those of `parallel.cache`; a prefix has p positions, which all hypotheses of a source share.
"""

import tensorflow as tf

from dtransformer.layers.attention_mask import expand_mask, is_near
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.decoding import cache as kv_cache
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def with_new_positions(
    cache: dict,
    k: tf.Tensor,
    v: tf.Tensor,
    mask: tf.Tensor | None,
    prefix_mask: tf.Tensor | None,
    window: int | None,
) -> tuple[dict, tf.Tensor]:
    """Put new positions into a cache.

    Args:
        cache: as `MultiHeadAttention`'s.
        k, v: tensors [b·k, m, s, d].
        mask: what may be seen of the entries, as `MultiHeadAttention`'s; None for all.
        prefix_mask: bool tensor [b, p]; None for all.
        window: how many positions are seen; None for all.

    Returns:
        The next cache, and a bool mask [b or 1, 1, s·k, p + e] of what may be seen of it.
    """
    num_sources, _, size, _ = static_or_dynamic_shape(cache["key"])
    num_new, num_hypotheses = _numbers(cache, k)
    index = cache["index"]
    key, value = kv_cache.put([cache["key"], cache["value"]], [k, v], index)
    extended = {**cache, "key": key, "value": value, "index": index + num_new}
    new = index + tf.range(num_new * num_hypotheses) // num_hypotheses
    near = is_near(new, tf.range(size) // num_hypotheses, causal=True, window=window)
    seen = near[None, None, :, :]
    if mask is not None:
        seen &= expand_mask(mask)
    if "prefix_key" not in cache:
        return extended, seen
    length = prefix_length(cache)
    if prefix_mask is None:
        prefix_mask = tf.ones([num_sources, length], "bool")
    prefix_mask = expand_mask(prefix_mask)
    if window is not None:
        prefix_mask &= is_near(length + new, tf.range(length), causal=True, window=window)
    shape = [num_sources, 1, num_new * num_hypotheses]
    parts = [tf.broadcast_to(prefix_mask, [*shape, length]), tf.broadcast_to(seen, [*shape, size])]
    return extended, tf.concat(parts, axis=-1)


def bias_of_entries(bias: PositionBias | None, cache: dict, q: tf.Tensor) -> tf.Tensor | None:
    """Return the bias [n, s·k or 1, p + e] of new positions' queries and all of a cache.

    Args:
        bias: a `PositionBias`, or None.
        cache: before the new positions are put in.
        q: tensor [b·k, n, s, d].
    """
    if bias is None:
        return None
    num_new, num_hypotheses = _numbers(cache, q)
    prefix = prefix_length(cache)
    length = prefix + static_or_dynamic_shape(cache["key"])[2] // num_hypotheses
    values = bias.block(bias.tensors, prefix + cache["index"], num_new, 0, length)
    if isinstance(num_hypotheses, int) and num_hypotheses == 1:
        return values
    entries = tf.repeat(values[:, :, prefix:], num_hypotheses, axis=2)
    values = tf.concat([values[:, :, :prefix], entries], axis=-1)
    return values if num_new == 1 else tf.repeat(values, num_hypotheses, axis=1)


def kept(cache: dict) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the keys and the values of a cache, those of a prefix first."""
    pairs = [("prefix_key", "prefix_value")] if "prefix_key" in cache else []
    pairs.append(("key", "value"))
    return [cache[key] for key, _ in pairs], [cache[value] for _, value in pairs]


def prefix_length(cache: dict) -> int | tf.Tensor:
    """Return the number p of positions of a cache's prefix; 0 where it has none."""
    return static_or_dynamic_shape(cache["prefix_key"])[2] if "prefix_key" in cache else 0


def _numbers(cache, x):
    """Return the numbers of new positions and of hypotheses of x [b·k, m, s, d]."""
    rows, _, num_new, _ = static_or_dynamic_shape(x)
    return num_new, rows // static_or_dynamic_shape(cache["key"])[0]
