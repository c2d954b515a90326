"""Horovod's operations, and the types in which tensors travel: the one way that all take.

Tensors of every type of `DTYPES` go in and come out. Where nothing is added, one that Horovod
does not have travels as the bits of another; a sum is computed in a type that holds it.

Several tensors of a function take part in arguments and results as rows [d, ...], one for
each of the group's d ranks, in the group's order. A group of one sends nothing. The calls of
the ranks are not compared: that is what `call` does for the public collectives.
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import logical_gpus
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.tracing.scoped import Scoped

# Guard that keeps TensorFlow from taking Horovod's operations for pure functions.


def never_constant(x: tf.Tensor) -> tf.Tensor:
    """Return x, sliced from a 0 that TensorFlow cannot compute beforehand, without a copy.

    A collective of a constant would be computed once, when a function is compiled, and never again:
    ranks whose input is none would wait for it.
    """
    if tf.executing_eagerly():
        return x
    rank = x.shape.rank
    if rank not in range(1, 9):  # a scalar, an unknown rank, or more than `Slice` can do
        return tf.reshape(never_constant(tf.reshape(x, [-1])), tf.shape(x))
    with tf.device("CPU:0"):
        zeros = tf.raw_ops.RandomUniformInt(shape=[rank], minval=0, maxval=1, seed=1, seed2=1)
    y = tf.raw_ops.Slice(input=x, begin=zeros, size=[-1] * rank)
    y.set_shape(x.shape)
    return y


def tied(value: tf.Tensor, y: tf.Tensor | None) -> tf.Tensor:
    """Return `value`, for which y has to be computed first, and compute y in any case.

    "In any case" does not hold in the functions that TensorFlow makes of gradients where
    the tape is around a `tf.function`: they compute what their results depend on.
    """
    if y is None or tf.executing_eagerly():
        return value
    first = tf.reshape(y, [-1])[:1]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[first])]):
        return tf.identity(value)


# Types that Horovod does not have -> types of as many bits.
_global_names = Scoped("global_collective_names", False)

_MOVED_AS = {"bfloat16": "uint16"}
# Types that Horovod does not add -> types in which their sums, maxima and minima are computed.
_REDUCED_AS = {
    "bfloat16": "float32",
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), "int32"),
}
# The same for sums that this rank computes.
_ADDED_AS = {**_REDUCED_AS, "float16": "float32"}

DTYPES = (*sorted(_REDUCED_AS), "float16", "float32", "float64", "int32", "int64")


def broadcast(x: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the root's tensor on every rank.

    Args:
        x: a tensor [...], on every rank of the root's shape and type.
        root: position of the rank whose tensor it is.
        group: the `Group` of the ranks.
        name: the same on every rank, and no other collective's that is under way.
    """
    if group.size == 1:
        return x
    y = _move("broadcast", x, group, name, root_rank=group.ranks[root])
    y.set_shape(x.shape)
    return y


def broadcast_together(tensors: list, root: int, group: Group, name: str) -> list:
    """Return the root's tensors, of any shapes and types, by one broadcast for each type."""

    def as_one(tensors, dtype):
        flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)
        flat = broadcast(flat, root, group, f"{name}_{dtype}")
        split = tf.split(flat, [tf.size(x) for x in tensors], num=len(tensors))
        return [tf.reshape(one, tf.shape(x)) for one, x in zip(split, tensors)]

    return by_dtype(as_one, tensors)


def all_gather(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors [...] as rows [d, ...]."""
    if group.size == 1:
        return x[None]
    rows = _move("allgather", x[None], group, name)
    rows.set_shape([group.size, *x.shape])
    return _from_rank_order(rows, group)


def concatenate(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors [nᵢ, ...], one after the other, by rank: [Σ nᵢ, ...]."""
    return x if group.size == 1 else _move("allgather", x, group, name)


def all_to_all(rows: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Send row i to position i; return the rows [d, ...] that come from the others."""
    if group.size == 1:
        return rows
    received = _move("alltoall", _to_rank_order(rows, group), group, name)
    received.set_shape(rows.shape)
    return _from_rank_order(received, group)


def gather(x: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors [...] as rows [d, ...] on the root, [0, ...] elsewhere."""
    if group.size == 1:
        return x[None]
    is_root = group.index == root
    splits = [int(rank == group.ranks[root]) for rank in sorted(group.ranks)]
    rows, _ = _move("alltoall", x[None], group, name, splits=splits)
    rows.set_shape([group.size if is_root else 0, *x.shape])
    return _from_rank_order(rows, group) if is_root else rows


def scatter(rows: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the row [...] of the root's rows [d, ...] that has this rank's position."""
    if group.size == 1:
        return rows[0]
    splits = [int(group.index == root)] * group.size  # the others send nothing
    received, _ = _move("alltoall", _to_rank_order(rows, group), group, name, splits=splits)
    received.set_shape([1, *rows.shape[1:]])
    return received[0]


def all_reduce(x: tf.Tensor, op: str, group: Group, name: str) -> tf.Tensor:
    """Return the sum of the ranks' tensors [...], or another reduction, on every rank.

    Args:
        x: a tensor of the same shape and type on every rank.
        op: `"Sum"`, or another of Horovod's: `"Max"`, `"Min"`, `"Product"`.
        group, name: as of `broadcast`.
    """
    if group.size == 1:
        return x
    y = never_constant(tf.cast(x, _REDUCED_AS.get(x.dtype.name, x.dtype)))
    y = _run("allreduce", y, group, name, op=getattr(job.horovod(), op))
    return tf.cast(y, x.dtype)


def all_reduce_together(tensors: list, group: Group, name: str) -> list:
    """Return the sums of the ranks' tensors, of one type, which travel together."""
    if group.size == 1:
        return tensors
    dtype = tensors[0].dtype
    sums = [tf.cast(x, _REDUCED_AS.get(dtype.name, dtype)) for x in tensors]
    sums = _run("grouped_allreduce", sums, group, name, op=job.horovod().Sum)
    return [tf.cast(total, dtype) for total in sums]


def reduce_scatter(rows: tf.Tensor, group: Group, name: str, dtype=None) -> tf.Tensor:
    """Return the row [...] of the sum of the ranks' rows [d, ...] that has this rank's position.

    Of a type that Horovod cannot add, or would add in 16 bits, every rank sends each other one its
    row, and adds what it gets in a type that holds the sum: half the bytes travel.

    Args:
        rows: a tensor [d, ...] of the same shape and type on every rank.
        group, name: as of `broadcast`.
        dtype: type of the result, by default that of the rows.
    """
    own = rows.dtype.name
    if group.size == 1:
        total = rows[0]
    elif own not in _ADDED_AS:
        ordered = _to_rank_order(rows, group)
        total = _run("reducescatter", ordered, group, name, op=job.horovod().Sum)
        total.set_shape([1, *rows.shape[1:]])
        total = total[0]
    else:
        total = tf.reduce_sum(tf.cast(all_to_all(rows, group, name), _ADDED_AS.get(own, own)), 0)
    return tf.cast(total, own if dtype is None else dtype)


def reduce_scatter_sections(sections: list, group: Group, name: str, dtype=None) -> tf.Tensor:
    """Return the sum of the ranks' section that has this rank's position.

    Each rank sends every other one that one's section and nothing else, whatever their sizes.

    Args:
        sections: list of d tensors [nᵢ], of the same shapes and one type on every rank.
        group, name: as of `broadcast`.
        dtype: type of the result, by default that of the sections.
    """
    own = sections[0].dtype.name
    if group.size == 1:
        return tf.cast(sections[0], own if dtype is None else dtype)
    order = _rank_order(group)
    splits = [sections[i].shape[0] for i in order]
    packed = tf.concat([sections[i] for i in order], 0)
    received, received_splits = _move("alltoall", packed, group, name, splits=splits)
    # Of a rank without a section the result is empty: TensorFlow would not compute it.
    received = tied(received, received_splits)
    rows = tf.reshape(received, [group.size, sections[group.index].shape[0]])
    total = tf.reduce_sum(tf.cast(rows, _ADDED_AS.get(own, own)), 0)
    return tf.cast(total, own if dtype is None else dtype)


def all_gather_sections(x: tf.Tensor, sizes: list[int], group: Group, name: str) -> list:
    """Return the tensors [nᵢ] of all ranks, a list in the group's order.

    Args:
        x: a tensor [n] of one type on every rank.
        sizes: n of each position.
        group, name: as of `broadcast`.
    """
    if group.size == 1:
        return [x]
    if not sizes[group.index]:  # nothing is a constant, which TensorFlow computes beforehand
        x = never_constant(tf.zeros([1], x.dtype))
    order, sent = _rank_order(group), [max(size, 1) for size in sizes]
    everyone = _move("allgather", x, group, name)
    everyone.set_shape([sum(sent)])
    parts = tf.split(everyone, [sent[i] for i in order])
    return [parts[order.index(i)][: sizes[i]] for i in range(group.size)]


def _move(operation: str, x: tf.Tensor, group: Group, name: str, **options):
    """Return what a Horovod operation that adds nothing makes of a tensor of any type.

    With `splits` these are two tensors: what is received, and how much from each rank.
    """
    bits = _MOVED_AS.get(x.dtype.name)
    sent = tf.bitcast(x, bits) if bits else x
    received = _run(operation, sent, group, name, **options)
    received, *splits = received if "splits" in options else [received]
    received = tf.bitcast(received, x.dtype) if bits else received
    return (received, *splits) if splits else received


def global_names() -> contextlib.AbstractContextManager:
    """Give collectives inside the `with` block names without the surrounding name scopes.

    TensorFlow numbers the scopes of branches depending on the rest of a function, which differs
    between ranks that update different weights.
    """
    return _global_names.set(True)


def _run(operation, x, group, name, **options):
    """Return what a Horovod operation gives, which the ranks' names and group pair."""
    key = {"ignore_name_scope": _global_names.get()}
    key |= {"name": name, "process_set": group.process_set}
    # NCCL takes no two ranks of one card; those of logical GPUs are tried over the host.
    place = tf.device("/CPU:0") if logical_gpus() > 1 else contextlib.nullcontext()
    with job.waiting(f"{operation} {name!r}", group.ranks), place:
        return getattr(job.horovod(), operation)(x, **key, **options)


# Horovod's order of a group's rows is that of the ranks' numbers.


def _rank_order(group: Group) -> list[int]:
    """Return the positions of a group's ranks, in the order of the ranks' numbers."""
    return [group.ranks.index(rank) for rank in sorted(group.ranks)]


def _to_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Return rows that are in the group's order in that of the ranks' numbers."""
    return _take(rows, _rank_order(group))


def _from_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Return rows that are in the order of the ranks' numbers in the group's."""
    return _take(rows, [sorted(group.ranks).index(rank) for rank in group.ranks])


def _take(rows, order):
    return rows if order == sorted(order) else tf.gather(rows, order)


def by_dtype(collective: Callable, tensors: list, *others: list) -> list:
    """Return what a collective of lists of tensors of one type gives for tensors of any.

    Args:
        collective: a function of a list of tensors of one type, of as many items of each of
            `others`, and of the name of the type; it returns a list of as many.
        tensors: list of tensors.
        *others: lists of as many items.

    Returns:
        A list of as many, in the tensors' order.

    Example:

    >>> import numpy as np
    >>> mixed = [np.int8(1), np.float32(2), np.int8(3)]
    >>> by_dtype(lambda tensors, names, dtype: [
    ...     f"{name}: one of {len(tensors)} {dtype}" for name in names], mixed, "abc")
    ['a: one of 2 int8', 'b: one of 1 float32', 'c: one of 2 int8']
    """
    positions = {}
    for position, x in enumerate(tensors):
        positions.setdefault(x.dtype.name, []).append(position)
    results = [None] * len(tensors)
    for dtype, together in positions.items():
        items = [[each[i] for i in together] for each in (tensors, *others)]
        for i, result in zip(together, collective(*items, dtype), strict=True):
            results[i] = result
    return results
