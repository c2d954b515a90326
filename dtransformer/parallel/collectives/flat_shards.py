"""Flat shards of tensors over a group of ranks, one shard per rank.

A tensor of `n` elements is flattened, padded with zeros and divided into `d` shards of ⌈n/d⌉
elements, or by a `Division`. The rank at position i has shard i. One collective carries several
tensors. Unlike the public collectives, these functions do not compare the ranks' calls, because
ranks may trace their steps at different times, for batches of different shapes.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.runtime.process_groups import Group


def to_shards(x: tf.Tensor, num_shards: int) -> tf.Tensor:
    """Return the shards `[d, ⌈n/d⌉]` of a tensor with a static shape."""
    size = Division.even(math.prod(x.shape), num_shards).sizes[0]
    padding = size * num_shards - math.prod(x.shape)
    flat = tf.reshape(x, [-1])
    return tf.reshape(tf.pad(flat, [[0, padding]]) if padding else flat, [num_shards, size])


def from_shards(shards: tf.Tensor, shape: tuple) -> tf.Tensor:
    """Return the tensor of the given shape from its shards `[d, ⌈n/d⌉]`."""
    flat = tf.reshape(shards, [-1])
    num_elements = math.prod(shape)
    return tf.reshape(flat if flat.shape[0] == num_elements else flat[:num_elements], shape)


def get_local_shard(x: tf.Tensor, group: Group, division: Division | None = None) -> tf.Tensor:
    """Return this rank's flat shard of a tensor with a static shape.

    Args:
        x: Tensor of `n` elements with a static shape.
        group: `Group` of `d` ranks.
        division: `Division` of the elements. `None` divides evenly, into shards of ⌈n/d⌉.

    Returns:
        A tensor of one dimension, padded with zeros.
    """
    division = division or Division.even(math.prod(x.shape), group.size)
    start, stop = division.get_range(group.index)
    shard = tf.reshape(x, [-1])[start:stop]
    missing = stop - start - max(min(stop, math.prod(x.shape)) - start, 0)
    return tf.pad(shard, [[0, missing]]) if missing else shard


def reduce_scatter(
    tensors: list,
    group: Group,
    name: str,
    dtype: str | None = None,
    divisions: Sequence[Division] | None = None,
) -> list:
    """Return this rank's shards of the tensors' sums over the group, with one collective.

    Args:
        tensors: List of float tensors with static shapes and the same dtype.
        group: `Group`.
        name: Name of the collective, identical on all ranks.
        dtype: Name of the dtype to send. Defaults to the dtype of the tensors. Sums of bfloat16
            are computed in float32.
        divisions: Sequence with the `Division` of each tensor. `None` divides evenly.

    Returns:
        A list of flat tensors in the dtype of `tensors`, of ⌈n/d⌉ elements if divided evenly.
    """
    sent = [tf.cast(x, dtype or x.dtype) for x in tensors]
    result_dtype = tensors[0].dtype
    if _are_even(divisions):
        shards = [to_shards(x, group.size) for x in sent]
        sizes = [shard.shape[1] for shard in shards]
        total = transport.reduce_scatter(_concat(shards, 1), group, name, result_dtype)
    else:
        sizes = [division.sizes[group.index] for division in divisions]
        sections = []
        for i in range(group.size):
            ranges = [slice(*division.get_range(i)) for division in divisions]
            parts = [tf.reshape(x, [-1])[part] for x, part in zip(sent, ranges)]
            sections.append(_concat(parts))
        total = transport.reduce_scatter_sections(sections, group, name, result_dtype)
    return tf.split(total, sizes) if len(sizes) > 1 else [total]


def all_gather(
    shards: list, shapes: list, group: Group, name: str, divisions: Sequence[Division] | None = None
) -> list:
    """Return full tensors from the ranks' shards, with one collective.

    Args:
        shards: List of this rank's flat shards, all of the same dtype.
        shapes: List of the shapes of the full tensors.
        group: `Group`.
        name: Name of the collective, identical on all ranks.
        divisions: Sequence with the `Division` of each tensor. `None` divides evenly.
    """
    if _are_even(divisions):
        sizes = [shard.shape[0] for shard in shards]
        packed = transport.all_gather(_concat(shards), group, name)
        rows = tf.split(packed, sizes, axis=1) if len(sizes) > 1 else [packed]
        return [from_shards(shards, shape) for shards, shape in zip(rows, shapes)]
    sizes_by_rank = list(
        zip(*[division.sizes for division in divisions])
    )  # Sizes of the shards of each position.
    sections = transport.all_gather_sections(
        _concat(shards), [sum(sizes) for sizes in sizes_by_rank], group, name
    )
    rows = [tf.split(section, sizes) for section, sizes in zip(sections, sizes_by_rank)]
    return [from_shards(tf.concat(parts, 0), shape) for parts, shape in zip(zip(*rows), shapes)]


def all_reduce(tensors: list, group: Group, name: str, dtype: str | None = None) -> list:
    """Return the tensors' sums over the group. See `reduce_scatter` for the arguments.

    If `dtype` differs from the tensors' dtype, the sum is a reduce-scatter and an all-gather.
    """
    if dtype is None or dtype == tensors[0].dtype:
        return transport.all_reduce_together(tensors, group, name)
    sums = reduce_scatter(tensors, group, f"{name}_to_shards", dtype)
    sums = [tf.cast(total, dtype) for total in sums]
    sums = all_gather(sums, [x.shape for x in tensors], group, f"{name}_from_shards")
    return [tf.cast(total, x.dtype) for total, x in zip(sums, tensors)]


def _are_even(divisions):
    return divisions is None or all(len(set(division.sizes)) == 1 for division in divisions)


def _concat(tensors, axis=0):
    return tf.concat(tensors, axis) if len(tensors) > 1 else tensors[0]
