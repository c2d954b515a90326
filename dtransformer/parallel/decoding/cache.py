"""Cache of keys and values for token-by-token decoding.

A cache has an entry for every position and each of the k hypotheses of a source: entry p·k + c is
position p of hypothesis c. A mask selects the entries of a hypothesis that continues another one,
so entries never move. A cache with room for r positions is a ring: position p replaces p - r, which
attention with a window of r no longer sees.
Shapes: b sources, n heads, e = r·k entries, d features of a head.
"""

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

_AXES = ("batch", "heads", "memory_length", "head_dim")


def empty(shape: list, dtype: str) -> tf.Tensor:
    """Return a cache `[b, n, e, d]` of zeros.

    In a decoding loop it is a separate tensor, because it is updated in place. TensorFlow might
    otherwise share one tensor of zeros between all caches.
    """
    if trace.is_decoding_loop():
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
    return constrain(tf.zeros(shape, dtype), _AXES)


def positions_of(size: int | tf.Tensor, last: tf.Tensor, num_hypotheses=1) -> tf.Tensor:
    """Return the positions of a cache's entries, int32 `[e]`. Empty entries are negative.

    Args:
        size: Integer or scalar tensor. Number e of entries.
        last: Integer scalar tensor. Last position in the cache.
        num_hypotheses: Integer. Number k of hypotheses per source. Defaults to `1`.
    """
    places = tf.range(size) // num_hypotheses
    return last - (last - places) % (size // num_hypotheses)


def put(tensors: list[tf.Tensor], new: list[tf.Tensor], index: tf.Tensor) -> list[tf.Tensor]:
    """Return caches with a new position.

    In a decoding loop the caches are updated in place, so the inputs change. The time then does not
    depend on the capacity.

    Args:
        tensors: List of caches `[b, n, e, d]`.
        new: List of tensors `[b·k, n, 1, d]`, one per cache.
        index: Integer scalar tensor. The position.
    """
    b, n, e, d = static_or_dynamic_shape(tensors[0])
    k = static_or_dynamic_shape(new[0])[0] // b
    slot = index % (e // k)
    if trace.is_decoding_loop():
        # Row of each hypothesis in [b·n·e, d], with the dimensions b, k and n.
        sources, hypotheses, heads = (
            tf.reshape(tf.range(size), [-1, *[1] * later])
            for size, later in ((b, 2), (k, 1), (n, 0))
        )
        indices = tf.reshape((sources * n + heads) * e + slot * k + hypotheses, [-1])
        flat = [tf.reshape(x, [-1, d]) for x in tensors]
        flat = [
            tf.raw_ops.InplaceUpdate(x=x, i=indices, v=tf.reshape(y, [-1, d]))
            for x, y in zip(flat, new, strict=True)
        ]
        return [tf.reshape(x, [b, n, e, d]) for x in flat]
    new = [side_by_side(x, b) for x in new]
    entries = tf.range(e)
    if not (isinstance(k, int) and k == 1):
        new = [tf.gather(x, entries % k, axis=2) for x in new]
    is_new = (entries // k == slot)[None, None, :, None]
    pairs = zip(new, tensors, strict=True)
    return [constrain(tf.where(is_new, x, old), _AXES) for x, old in pairs]


def side_by_side(x: tf.Tensor, num_sources: int | tf.Tensor) -> tf.Tensor:
    """Convert `[b·k, n, s, d]` to `[b, n, s·k, d]`: positions of all hypotheses of a source."""
    rows, n, s, d = static_or_dynamic_shape(x)
    if isinstance(rows, int) and isinstance(num_sources, int) and rows == num_sources:
        return x
    x = tf.reshape(x, [num_sources, -1, n, s, d])
    return tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4]), [num_sources, n, -1, d])


def one_by_one(x: tf.Tensor, num_positions: int | tf.Tensor) -> tf.Tensor:
    """Convert `[b, n, s·k, d]` to `[b·k, s, n, d]`, with heads after positions."""
    b, n, queries, d = static_or_dynamic_shape(x)
    if isinstance(queries, int) and isinstance(num_positions, int) and queries == num_positions:
        return tf.transpose(x, [0, 2, 1, 3])
    x = tf.reshape(x, [b, n, num_positions, -1, d])
    return tf.reshape(tf.transpose(x, [0, 3, 2, 1, 4]), [-1, num_positions, n, d])
