"""Positions and masks of queries that attend to a cache.

See `decoding.cache` for the letters in shapes. A prompt has p positions, shared by all hypotheses
of a source.
"""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, expand_mask, is_near
from dtransformer.layers.position import segment_starts
from dtransformer.parallel.decoding.cache import KVCache, get_cache_positions
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def visible_entries(
    cache: KVCache,
    num_hypotheses: int | tf.Tensor,
    mask: tf.Tensor | None,
    prompt_mask: tf.Tensor | None,
    window: int | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the entries that the next position of each hypothesis may attend to.

    Args:
        cache: `KVCache` before the insertion of the next position.
        num_hypotheses: Integer. Number k of hypotheses per source.
        mask: Bool tensor of shape `[b, k, r·k]` for r positions, see `MultiHeadAttention`, or
            `None`.
        prompt_mask: Bool tensor of shape `[b, p]`, or `None`.
        window: Integer. Number of visible positions. `None` shows all.

    Returns:
        A `(visible, positions)` tuple: a bool tensor of shape `[b or 1, 1, k or 1, p + e]`, and the
        positions of the entries, int32 `[p + e]`. Positions count from the first one after the
        prompt. Prompt positions and empty entries are negative.
    """
    b, _, num_entries, _ = static_or_dynamic_shape(cache.key)
    # The cache has room for a single window, so all of its positions are in reach.
    positions = get_cache_positions(num_entries, cache.index, num_hypotheses)
    visible = (positions >= 0)[None, None, None, :]
    if mask is not None:
        mask = expand_mask(mask)
        if window is not None:
            hypotheses = tf.range(num_entries) % num_hypotheses
            places = hypotheses + tf.maximum(positions, 0) * num_hypotheses
            mask = tf.gather(mask, places, axis=3)
        visible &= mask
    if cache.prompt_key is None:
        return visible, positions
    num_stored = static_or_dynamic_shape(cache.prompt_key)[2]
    prompt_positions = tf.range(num_stored) - num_stored
    query = tf.reshape(cache.index, [1])
    near = is_near(query, prompt_positions, causal=True, window=window)[None, None, :, :]
    if prompt_mask is not None:
        num_hidden = static_or_dynamic_shape(prompt_mask)[1] - num_stored
        near &= expand_mask(prompt_mask[:, num_hidden:])
    rows = [b, 1, num_hypotheses]
    near = tf.broadcast_to(near, [*rows, num_stored])
    visible = tf.broadcast_to(visible, [*rows, num_entries])
    return tf.concat([near, visible], axis=-1), tf.concat([prompt_positions, positions], axis=0)


def sequence_positions(
    x: tf.Tensor, mask: tf.Tensor | Segments | None, restarts: bool
) -> tf.Tensor:
    """Return the position of each element of full sequences, from 0: int32 `[b or 1, s]`.

    Padding is counted, as in `transformers`.

    Args:
        x: Tensor of shape `[b, s, h]`.
        mask: Mask, see `MultiHeadAttention`.
        restarts: Boolean, whether positions restart in each packed sequence.
    """
    positions = tf.range(static_or_dynamic_shape(x)[1])[None]
    if restarts and isinstance(mask, Segments) and not mask.queries.dtype.is_bool:
        return positions - segment_starts(mask.queries)
    return positions


def prompt_positions(x: tf.Tensor, mask: tf.Tensor | Segments | None, restarts: bool) -> tf.Tensor:
    """Return the position of each element of prompts, from 0: int32 `[b or 1, s]`.

    Args:
        x, mask: See `sequence_positions`.
        restarts: Boolean, whether positions start after the padding on the left.
    """
    positions = tf.range(static_or_dynamic_shape(x)[1])[None]
    if restarts and isinstance(mask, Segments):
        return positions - count_tokens(~tf.cast(mask.queries, "bool"))[:, None]
    return positions


def next_positions(
    x: tf.Tensor, cache: KVCache, prompt_mask: tf.Tensor | None, restarts: bool
) -> tf.Tensor:
    """Return the position after the last one in a cache: int32 `[b·k or 1, 1]`.

    Args:
        x: Tensor of shape `[b·k, 1, h]`.
        cache: `KVCache` of earlier positions.
        prompt_mask: Bool tensor of shape `[b, p]`, or `None`.
        restarts: See `prompt_positions`.
    """
    if restarts and prompt_mask is not None:
        num_rows = static_or_dynamic_shape(x)[0]
        num_sources = static_or_dynamic_shape(prompt_mask)[0]
        num_tokens = tf.repeat(count_tokens(prompt_mask), num_rows // num_sources)
        return (num_tokens + cache.index)[:, None]
    return tf.reshape(cache.index + cache.num_prompt_positions, [1, 1])


def count_tokens(mask: tf.Tensor) -> tf.Tensor:
    """Return the number of visible tokens of each row of a bool mask, int32."""
    return tf.reduce_sum(tf.cast(mask, "int32"), axis=1)
