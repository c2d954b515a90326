"""Tensors as flat shards over a group of ranks, one shard a rank.

A tensor of n elements is flattened, padded with zeros and divided into d shards of ⌈n/d⌉
elements; shard i is that of the rank at position i. Several tensors travel in one collective.
Unlike the public collectives, these do not compare the ranks' calls: ranks may trace their
steps at different times, for batches of different shapes.
"""

import math

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.process_groups import Group


def shard_size(num_elements: int, num_shards: int) -> int:
    """Return the number of elements of each shard, padding included.

    Example:

    >>> shard_size(10, 4)
    3
    """
    return -(-num_elements // num_shards)


def to_shards(x: tf.Tensor, num_shards: int) -> tf.Tensor:
    """Return the shards of a tensor of known shape, [d, ⌈n/d⌉]."""
    size = shard_size(math.prod(x.shape), num_shards)
    padding = size * num_shards - math.prod(x.shape)
    flat = tf.reshape(x, [-1])
    return tf.reshape(tf.pad(flat, [[0, padding]]) if padding else flat, [num_shards, size])


def from_shards(shards: tf.Tensor, shape: tuple) -> tf.Tensor:
    """Return the tensor of a shape that shards [d, ⌈n/d⌉] were made of."""
    flat = tf.reshape(shards, [-1])
    num_elements = math.prod(shape)
    return tf.reshape(flat if flat.shape[0] == num_elements else flat[:num_elements], shape)


def own_range(size: int, group: Group) -> tuple:
    """Return (start, stop) of this rank's shard of `size` elements in the flat tensor."""
    return group.index * size, (group.index + 1) * size


def own_shard(x: tf.Tensor, group: Group) -> tf.Tensor:
    """Return this rank's shard of a tensor of known shape, [⌈n/d⌉]."""
    size = shard_size(math.prod(x.shape), group.size)
    start, stop = own_range(size, group)
    shard = tf.reshape(x, [-1])[start:stop]
    missing = size - max(min(size, math.prod(x.shape) - start), 0)
    return tf.pad(shard, [[0, missing]]) if missing else shard


def reduce_scatter(tensors: list, group: Group, name: str, dtype: str | None = None) -> list:
    """Return this rank's shards of the tensors' sums over the group, by one collective.

    Args:
        tensors: list of float tensors of known shapes, of one type.
        group: a `Group`.
        name: name of the collective, the same on every rank.
        dtype: name of the type that travels, by default the tensors' own. On CPUs sums of
            16-bit types are computed in float32.

    Returns:
        A list of tensors [⌈n/d⌉], of the tensors' type.
    """
    sizes = [shard_size(math.prod(x.shape), group.size) for x in tensors]
    packed = _concat([to_shards(tf.cast(x, dtype or x.dtype), group.size) for x in tensors], 1)
    total = transport.reduce_scatter(packed, group, name, tensors[0].dtype)
    return tf.split(total, sizes) if len(sizes) > 1 else [total]


def all_gather(shards: list, shapes: list, group: Group, name: str) -> list:
    """Return the tensors that the ranks hold shards of, by one collective.

    Args:
        shards: list of tensors [⌈n/d⌉], of one type.
        shapes: list of the tensors' shapes.
        group: a `Group`.
        name: name of the collective, the same on every rank.
    """
    sizes = [shard.shape[0] for shard in shards]
    packed = transport.all_gather(_concat(shards, 0), group, name)
    everyone = tf.split(packed, sizes, axis=1) if len(sizes) > 1 else [packed]
    return [from_shards(shards, shape) for shards, shape in zip(everyone, shapes)]


def all_reduce(tensors: list, group: Group, name: str, dtype: str | None = None) -> list:
    """Return the tensors' sums over the group; arguments as of `reduce_scatter`."""
    if dtype is None or dtype == tensors[0].dtype:
        return transport.all_reduce_together(tensors, group, name)
    sums = reduce_scatter(tensors, group, f"{name}_to_shards", dtype)
    sums = [tf.cast(total, dtype) for total in sums]
    sums = all_gather(sums, [x.shape for x in tensors], group, f"{name}_from_shards")
    return [tf.cast(total, x.dtype) for total, x in zip(sums, tensors)]


def _concat(tensors, axis):
    return tf.concat(tensors, axis) if len(tensors) > 1 else tensors[0]
