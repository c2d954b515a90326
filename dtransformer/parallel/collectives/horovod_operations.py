"""Horovod's operations, in the order of a group's ranks and for types that it does not have.

Those that compute sums take types that Horovod adds.
"""

import contextlib

import tensorflow as tf

from dtransformer.parallel import job, trace
from dtransformer.parallel.collectives.impure import never_constant
from dtransformer.parallel.devices import logical_gpus
from dtransformer.parallel.process_groups import Group

# Types that Horovod does not have -> types of as many bits.
_MOVED_AS = {"bfloat16": "uint16"}


def all_reduce(x: tf.Tensor, op: str, group: Group, name: str) -> tf.Tensor:
    """Return a reduction of the ranks' tensors; see `transport.all_reduce`."""
    hvd = job.horovod()
    return _run("allreduce", never_constant(x), group, name, op=getattr(hvd, op))


def all_reduce_together(tensors: list, group: Group, name: str) -> list:
    """Return the sums of the ranks' tensors; see `transport.all_reduce_together`."""
    hvd = job.horovod()
    return _run("grouped_allreduce", tensors, group, name, op=hvd.Sum)


def all_gather(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors [...] as rows [d, ...]; see `transport.all_gather`."""
    rows = move("allgather", x[None], group, name)
    rows.set_shape([group.size, *x.shape])
    return from_rank_order(rows, group)


def all_to_all(rows: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Send row i to position i, return what comes; see `transport.all_to_all`."""
    received = move("alltoall", to_rank_order(rows, group), group, name)
    received.set_shape(rows.shape)
    return from_rank_order(received, group)


def reduce_scatter(rows: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the row [...] of the sum of the ranks' rows [d, ...] that has this rank's position."""
    hvd = job.horovod()
    total = _run("reducescatter", to_rank_order(rows, group), group, name, op=hvd.Sum)
    total.set_shape([1, *rows.shape[1:]])
    return total[0]


def move(operation: str, x: tf.Tensor, group: Group, name: str, **options):
    """Return what a Horovod operation that adds nothing makes of a tensor of any type.

    With `splits` these are two tensors: what is received, and how much from each rank.
    """
    bits = _MOVED_AS.get(x.dtype.name)
    sent = tf.bitcast(x, bits) if bits else x
    received = _run(operation, sent, group, name, **options)
    received, *splits = received if "splits" in options else [received]
    received = tf.bitcast(received, x.dtype) if bits else received
    return (received, *splits) if splits else received


def _run(operation, x, group, name, **options):
    """Return what a Horovod operation gives, which the ranks' names and group pair."""
    key = {"ignore_name_scope": trace.current().names_are_global}
    key |= {"name": name, "process_set": group.process_set}
    # NCCL takes no two ranks of one card; those of logical GPUs are tried over the host.
    place = tf.device("/CPU:0") if logical_gpus() > 1 else contextlib.nullcontext()
    with job.waiting(f"{operation} {name!r}", group.ranks), place:
        return getattr(job.horovod(), operation)(x, **key, **options)


# Horovod's order of a group's rows is that of the ranks' numbers.


def rank_order(group: Group) -> list[int]:
    """Return the positions of a group's ranks, in the order of the ranks' numbers."""
    return [group.ranks.index(rank) for rank in sorted(group.ranks)]


def to_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Return rows that are in the group's order in that of the ranks' numbers."""
    return _take(rows, rank_order(group))


def from_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Return rows that are in the order of the ranks' numbers in the group's."""
    return _take(rows, [sorted(group.ranks).index(rank) for rank in group.ranks])


def _take(rows, order):
    return rows if order == sorted(order) else tf.gather(rows, order)
