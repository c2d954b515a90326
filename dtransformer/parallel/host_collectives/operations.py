"""Collectives of a group of ranks that share a host's memory, in place of Horovod's.

TensorFlow does not compute them beforehand, nor leave them out: it takes them for stateful, and
runs those of a `tf.function` one after another.
"""

import zlib

import tensorflow as tf

from dtransformer.parallel import job, trace
from dtransformer.parallel.process_groups import Group

# What Horovod calls reductions -> what TensorFlow does.
_MERGES = {"Sum": "Add", "Product": "Mul", "Min": "Min", "Max": "Max"}
DTYPES = ("float16", "float32", "float64", "int32", "int64")  # that all of the operations take


def all_reduce(x: tf.Tensor, op: str, group: Group, name: str) -> tf.Tensor:
    """Return a reduction of the ranks' tensors [...], the same to the last bit on every rank.

    Args:
        x: a tensor of the same shape and type on every rank.
        op: `"Sum"`, `"Product"`, `"Min"` or `"Max"`.
        group: a `Group` that has a `host_key`.
        name: the same on every rank, and no other collective's that is under way.
    """
    return _run("CollectiveReduceV2", x, group, name, merge_op=_MERGES[op], final_op="Id")


def all_reduce_together(tensors: list, group: Group, name: str) -> list:
    """Return the sums of the ranks' tensors, one by one: nothing is lost by that."""
    return [all_reduce(x, "Sum", group, f"{name}_{i}") for i, x in enumerate(tensors)]


def all_gather(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors [...] as rows [d, ...], in the group's order; see `all_reduce`."""
    rows = _run("CollectiveGatherV2", x[None], group, name)
    rows.set_shape([group.size, *x.shape])
    return rows


def all_to_all(rows: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Send row i of [d, ...] to position i; return what comes; see `all_reduce`."""
    received = _run("CollectiveAllToAllV2", rows, group, name)
    received.set_shape(rows.shape)
    return received


def _run(operation, x, group, name, **options):
    """Return what an operation gives, which is paired as by Horovod: by a name in its scope."""
    if not tf.executing_eagerly() and not trace.current().names_are_global:
        name = tf.compat.v1.get_default_graph().unique_name(name)
    key = {
        "group_size": group.size,
        "group_key": group.host_key,
        "instance_key": zlib.crc32(name.encode()) & 0x7FFFFFFF,
        "ordering_token": [],
    }
    with job.waiting(f"{operation} {name!r}", group.ranks):
        return getattr(tf.raw_ops, operation)(input=x, **key, **options)
