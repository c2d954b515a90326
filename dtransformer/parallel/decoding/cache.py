"""The keys and values that attention keeps while tokens are decoded one after the other.

A cache has the entries of all positions, and at each position one for each of the k hypotheses
of a source: entry p·k + c is position p of hypothesis c. Hypotheses that continue others are told
by a mask which entries are theirs, so that no entry is ever moved. A cache with room for r positions
is a ring: position p takes the place of p - r, as attention with a window of r sees no more of it.
Shapes: b sources, n heads, e = r·k entries, d features of a head.
"""

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

_AXES = ("batch", "heads", "memory_length", "head_dim")


def empty(shape: list, dtype: str) -> tf.Tensor:
    """Return a cache [b, n, e, d] of zeros.

    In a loop of `decoding` it is a tensor of its own, as it is updated in place: of all caches' zeros
    TensorFlow may make one.
    """
    if trace.is_decoding_loop():
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
    return constrain(tf.zeros(shape, dtype), _AXES)


def positions_of(size: int | tf.Tensor, last: tf.Tensor, num_hypotheses=1) -> tf.Tensor:
    """Return the positions of a cache's entries, int32 [e]; negative of those that have none.

    Args:
        size: number e.
        last: int scalar, the last position that there is.
        num_hypotheses: number k.
    """
    places = tf.range(size) // num_hypotheses
    return last - (last - places) % (size // num_hypotheses)


def put(tensors: list[tf.Tensor], new: list[tf.Tensor], index: tf.Tensor) -> list[tf.Tensor]:
    """Return caches with a new position.

    In a loop of `decoding` they are the old ones, which are no longer as they were: the time does
    not grow with the capacity.

    Args:
        tensors: list of caches [b, n, e, d].
        new: list of tensors [b·k, n, 1, d], one for each.
        index: int scalar, the position.
    """
    b, n, e, d = static_or_dynamic_shape(tensors[0])
    k = static_or_dynamic_shape(new[0])[0] // b
    place = index % (e // k)
    if trace.is_decoding_loop():
        # The row of each in [b·n·e, d]; dimensions are b, k, n.
        sources, hypotheses, heads = (
            tf.reshape(tf.range(size), [-1, *[1] * later])
            for size, later in ((b, 2), (k, 1), (n, 0))
        )
        at = tf.reshape((sources * n + heads) * e + place * k + hypotheses, [-1])
        flat = [tf.reshape(x, [-1, d]) for x in tensors]
        flat = [
            tf.raw_ops.InplaceUpdate(x=x, i=at, v=tf.reshape(y, [-1, d]))
            for x, y in zip(flat, new, strict=True)
        ]
        return [tf.reshape(x, [b, n, e, d]) for x in flat]
    new, entries = [side_by_side(x, b) for x in new], tf.range(e)
    if not (isinstance(k, int) and k == 1):
        new = [tf.gather(x, entries % k, axis=2) for x in new]
    is_new = (entries // k == place)[None, None, :, None]
    pairs = zip(new, tensors, strict=True)
    return [constrain(tf.where(is_new, x, old), _AXES) for x, old in pairs]


def side_by_side(x: tf.Tensor, num_sources: int | tf.Tensor) -> tf.Tensor:
    """[b·k, n, s, d] -> [b, n, s·k, d]: positions of all hypotheses of a source"""
    rows, n, s, d = static_or_dynamic_shape(x)
    if isinstance(rows, int) and isinstance(num_sources, int) and rows == num_sources:
        return x
    x = tf.reshape(x, [num_sources, -1, n, s, d])
    return tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4]), [num_sources, n, -1, d])


def one_by_one(x: tf.Tensor, num_positions: int | tf.Tensor) -> tf.Tensor:
    """[b, n, s·k, d] -> [b·k, s, n, d]: the opposite, with heads behind positions"""
    b, n, queries, d = static_or_dynamic_shape(x)
    if isinstance(queries, int) and isinstance(num_positions, int) and queries == num_positions:
        return tf.transpose(x, [0, 2, 1, 3])
    x = tf.reshape(x, [b, n, num_positions, -1, d])
    return tf.reshape(tf.transpose(x, [0, 3, 2, 1, 4]), [-1, num_positions, n, d])
