"""Tensors cut into flat slices over a group of ranks, one slice a rank.

A tensor of n entries is flattened and padded with zeros to d rows of ⌈n/d⌉ entries; row i
is rank i's slice. Several tensors travel as one message. Unlike the `collectives`, these
do not compare the ranks' calls: ranks may trace their steps at different times, for
batches of different shapes.
"""

import math

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.devices import device_type

# Types that Horovod does not carry, or adds with their own precision, travel as bits.
_AS_BITS = {"float16": "uint16", "bfloat16": "uint16"}


def shard_size(num_entries, num_slices):
    """Return the number of entries of each slice.

    Example:

    >>> slice_size(10, 4)
    3
    """
    return -(-num_entries // num_slices)


def to_shards(x, num_slices):
    """Return the slices of a tensor of known shape, [d, ⌈n/d⌉]."""
    size = shard_size(math.prod(x.shape), num_slices)
    padding = size * num_slices - math.prod(x.shape)
    flat = tf.reshape(x, [-1])
    return tf.reshape(tf.pad(flat, [[0, padding]]) if padding else flat, [num_slices, size])


def own_range(size, group):
    """Return (start, stop) of this rank's slice of so many entries, padding included."""
    return group.index * size, (group.index + 1) * size


def own_shard(x, group):
    """Return this rank's slice of a tensor of known shape, [⌈n/d⌉]."""
    size = shard_size(math.prod(x.shape), group.size)
    start, stop = own_range(size, group)
    part = tf.reshape(x, [-1])[start:stop]
    missing = size - max(min(size, math.prod(x.shape) - start), 0)
    return tf.pad(part, [[0, missing]]) if missing else part


def from_shards(rows, shape):
    """Return the tensor of a shape that `rows` was made of."""
    flat = tf.reshape(rows, [-1])
    num_entries = math.prod(shape)
    return tf.reshape(flat if flat.shape[0] == num_entries else flat[:num_entries], shape)


def reduce_scatter(tensors, group, name, dtype=None):
    """Return this rank's slices of the tensors' sums over the group, in one message.

    On CPUs every rank sends each other one its slice, and adds: Horovod's own
    reduce-scatter takes three times as long there.

    Args:
        tensors: list of float tensors of known shapes, of one type.
        group: a `Group`.
        name: name of the message, the same on every rank.
        dtype: name of the type that travels, by default the tensors' own. On CPUs the sum
            of 16-bit types is computed in float32.

    Returns:
        A list of tensors [⌈n/d⌉], of the tensors' type.
    """
    sizes = [shard_size(math.prod(x.shape), group.size) for x in tensors]
    packed = _concat([to_shards(tf.cast(x, dtype or x.dtype), group.size) for x in tensors], 1)
    if group.size == 1:
        total = packed[0]
    elif device_type() == "GPU":
        hvd = job.horovod()
        total = hvd.reducescatter(packed, op=hvd.Sum, name=name, process_set=group.process_set)
        total = total[0]
    else:
        received = _carried(packed, "alltoall", group, name)
        is_short = received.dtype.name in _AS_BITS
        total = tf.reduce_sum(tf.cast(received, "float32") if is_short else received, 0)
    total = tf.cast(total, tensors[0].dtype)
    total.set_shape([sum(sizes)])
    return tf.split(total, sizes) if len(sizes) > 1 else [total]


def all_gather(slices, shapes, group, name):
    """Return the tensors that the ranks hold slices of, in one message.

    Args:
        slices: list of tensors [⌈n/d⌉], of one type.
        shapes: list of the shapes of the whole tensors.
        group: a `Group`.
        name: name of the message, the same on every rank.
    """
    sizes = [part.shape[0] for part in slices]
    packed = _concat(slices, 0)[None]
    if group.size > 1:
        packed = _carried(packed, "allgather", group, name)
    parts = tf.split(packed, sizes, axis=1) if len(sizes) > 1 else [packed]
    return [from_shards(part, shape) for part, shape in zip(parts, shapes)]


def all_reduce(tensors, group, name, dtype=None):
    """Return the tensors' sums over the group; arguments as of `reduce_scatter`."""
    if dtype is None or dtype == tensors[0].dtype:
        hvd = job.horovod()
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name, process_set=group.process_set)
    sums = reduce_scatter(tensors, group, f"{name}_to_slices", dtype)
    sums = [tf.cast(total, dtype) for total in sums]
    sums = all_gather(sums, [x.shape for x in tensors], group, f"{name}_from_slices")
    return [tf.cast(total, x.dtype) for total, x in zip(sums, tensors)]


def _concat(parts, axis):
    return tf.concat(parts, axis) if len(parts) > 1 else parts[0]


def _carried(x, operation, group, name):
    """Return the rows that a Horovod operation makes of a tensor, of which it carries the bits."""
    rows = carried(x, operation, group, name)
    rows.set_shape([group.size, x.shape[-1]])
    return rows


def carried(x, operation, group, name, **options):
    """Return what a Horovod operation that adds nothing makes of a tensor of any type.

    Args:
        x: tensor.
        operation: name of Horovod's function.
        group: a `Group`.
        name: name of the message, the same on every rank.
        **options: other arguments of the function.
    """
    bits = _AS_BITS.get(x.dtype.name)
    operation = getattr(job.horovod(), operation)
    sent = tf.bitcast(x, bits) if bits else x
    received = operation(sent, name=name, process_set=group.process_set, **options)
    return tf.bitcast(received, x.dtype) if bits else received
