"""Random numbers by row of the global batch, equal on every layout.

Philox is a counter-based generator: a call with a later counter continues the numbers of an earlier
call. Each row takes a fixed number of counters, so the first row of a tensor selects its first
counter. Data shards, micro-batches and pipelines therefore draw exactly the numbers that one process
draws for the same rows.

On a mesh each device draws its rows as if they were replicated, with the counter of its first row.
Devices along other axes draw equal numbers and use their slices.

Reference: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis, relayout
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tracing import trace

_PHILOX = 1
"""Id of the Philox algorithm in TensorFlow's random operations."""

_WORDS_PER_COUNTER = 4
_BYTES_PER_COUNTER = 4 * _WORDS_PER_COUNTER

_THRESHOLDS = 2**62
"""Offset of the random numbers that select thresholds. Parts of masks have smaller offsets."""


def kept_elements(
    shape: Sequence, rate: float, seed: tf.Tensor, random_id: int | tf.Tensor = 0, part: int = 0
) -> tf.Tensor:
    """Return a dropout mask: a boolean tensor that is `False` with probability `rate`.

    Each element compares 8 random bits with a threshold. The 256 possible thresholds are too coarse
    for most rates, so each column of the last dimension draws one of the two thresholds next to
    `rate`. This makes the probability exact to 2⁻³². Rates from 255/256 use 32 bits per element.

    Args:
        shape: List of integers, or of scalar tensors for unknown dimensions. The first dimension
            is the rows of a batch.
        rate: Float in [0, 1). Probability of dropping an element.
        seed: Integer tensor, see `dropout_seed`.
        random_id: Integer in [0, 2³¹) or scalar int32 tensor. Masks with the same seed but
            different ids are independent. Defaults to `0`.
        part: Integer in [0, 2³⁰). Masks with different parts are independent. Defaults to `0`.
    """
    stream = _Stream(seed, random_id, part * 2**32)
    lower = math.floor(rate * 2**8)

    def draw(shape, first_row):
        if lower == 2**8 - 1:
            threshold = min(round(rate * 2**32), 2**32 - 1)
            return stream.rows(shape, first_row, tf.uint32) >= tf.constant(threshold, "uint32")
        fraction = min(round((rate * 2**8 - lower) * 2**32), 2**32 - 1)
        draws = stream.words([shape[-1]], offset=_THRESHOLDS)
        takes_upper = draws < tf.constant(fraction, "uint32")
        thresholds = tf.cast(takes_upper, "uint8") + tf.constant(lower, "uint8")
        return stream.rows(shape, first_row, tf.uint8) >= thresholds

    return _draw_by_rows(draw, shape, seed)


def random_floats(shape: Sequence, seed: tf.Tensor, random_id: int | tf.Tensor = 0) -> tf.Tensor:
    """Return float32 random numbers in [0, 1).

    Args:
        shape: See `kept_elements`.
        seed: Integer tensor, see `dropout_seed`.
        random_id: See `kept_elements`. Defaults to `0`.
    """
    stream = _Stream(seed, random_id)

    def draw(shape, first_row):
        # TensorFlow also uses the low bits of a word. XLA uses the high bits.
        words = tf.bitwise.bitwise_and(stream.rows(shape, first_row, tf.uint32), 2**23 - 1)
        return tf.cast(words, "float32") * 2.0**-23

    return _draw_by_rows(draw, shape, seed)


def _draw_by_rows(draw, shape, seed):
    """Return `draw(shape, first_row)`, on a mesh in the layout of the rows."""
    rows, *dims = shape if len(shape) > 1 else [*(shape or [1]), 1]
    first_row = _first_row(seed, rows)
    has_coordinate = trace.is_on_mesh() and seed.shape[0] == 5
    axis = mesh_axis("batch") if has_coordinate else None
    num_shards = axis_size(axis)
    if num_shards == 1 or rows % num_shards:
        return tf.reshape(_replicate(draw([rows, *dims], first_row)), shape)
    rows //= num_shards
    numbers = _replicate(draw([rows, *dims], first_row + rows * tf.cast(seed[4], INDEX_TYPE)))
    # The values differ between devices, although their layout is replicated. A selection by a
    # sharded tensor gives the layout [data, rows, ...] without communication.
    ones = tf.ones([num_shards, *[1] * (1 + len(dims))], "bool")
    ones = relayout(ones, [axis, *[None] * (1 + len(dims))])
    numbers = tf.where(ones, tf.expand_dims(numbers, 0), tf.zeros([], numbers.dtype))
    return tf.reshape(numbers, shape)


def _first_row(seed, num_rows):
    """Return the index in the global batch of the first of `num_rows` rows, or 0 if it is unknown.

    If a network splits each row of its inputs into several rows, their indices are multiples.
    """
    if seed.shape[0] < 4:
        return tf.zeros([], INDEX_TYPE)
    first_row, num_input_rows = tf.unstack(tf.cast(seed[2:4], INDEX_TYPE))
    rows_per_input_row = tf.cast(num_rows, INDEX_TYPE) // tf.maximum(num_input_rows, 1)
    return first_row * rows_per_input_row


def _replicate(x):
    """Pin the replicated layout. DTensor would change the key of a sharded random operation."""
    return relayout(x, [None] * len(x.shape)) if trace.is_on_mesh() else x


class _Stream:
    """Random numbers of one seed and one random id.

    The seed is the key and the id is part of the initial counter, so that numbers with different
    ids are independent. `tf.random.stateless_uniform` would first hash the seed, which takes 46
    operations per mask.

    Args:
        seed: Integer tensor with the key in its first two elements.
        random_id: Integer or scalar int32 tensor.
        offset: Integer, added to the random id. Defaults to `0`.
    """

    def __init__(self, seed, random_id, offset=0):
        # GPUs have kernels for sums of int64, but not of uint64.
        key = tf.reduce_sum(tf.cast(seed[:2], "int64") * [2**32, 1], keepdims=True)
        self._key = tf.cast(key, "uint64")
        self._random_id = random_id
        self._offset = offset

    def words(self, shape, start=0, offset=0):
        """Return uint32 numbers from the counter `start` on."""
        # The operation increments the low word of the counter, which comes first.
        high = tf.cast(self._random_id, "int64") + self._offset + offset
        counter = tf.stack([tf.cast(start, "int64"), high])
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=tf.convert_to_tensor(shape, "int32"),
            key=self._key,
            counter=tf.cast(counter, "uint64"),
            alg=_PHILOX,
            dtype="uint32",
        )

    def rows(self, shape, first_row, dtype):
        """Return numbers of the given shape for rows from `first_row` on.

        Args:
            shape: List of at least two dimensions.
            first_row: Int64 scalar.
            dtype: `tf.uint8` or `tf.uint32`.
        """
        num_rows, *dims = shape
        size = math.prod(dims)
        numbers_per_counter = _BYTES_PER_COUNTER // dtype.size
        num_counters = (size + numbers_per_counter - 1) // numbers_per_counter
        start = first_row * tf.cast(num_counters, INDEX_TYPE)
        numbers = self.words([num_rows, num_counters * _WORDS_PER_COUNTER], start)
        padded_size = num_counters * numbers_per_counter
        if dtype == tf.uint8:
            numbers = tf.reshape(tf.bitcast(numbers, dtype), [num_rows, padded_size])
        is_padded = tf.is_tensor(size) or size != padded_size
        return tf.reshape(numbers[:, :size] if is_padded else numbers, shape)
