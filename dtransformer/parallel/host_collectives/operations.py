"""Collectives of a group of ranks that share a host's memory, in place of Horovod's.

TensorFlow does not compute them beforehand, nor leave them out: it takes them for stateful.
"""

import zlib

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.host_collectives.start import key_of

# What Horovod calls reductions -> what TensorFlow does.
_MERGES = {"Sum": "Add", "Product": "Mul", "Min": "Min", "Max": "Max"}
_DTYPES = ("float16", "float32", "float64", "int32", "int64")  # that all of the operations take


def serve(ranks: tuple[int, ...], dtype: tf.DType) -> bool:
    """Return whether these operations are there for tensors of a group.

    Args:
        ranks: the group's, in its order.
        dtype: of the tensors.
    """
    return key_of(ranks) is not None and dtype.name in _DTYPES


def all_reduce(x: tf.Tensor, op: str, ranks: tuple[int, ...], name: str) -> tf.Tensor:
    """Return a reduction of the ranks' tensors [...], the same to the last bit on every rank.

    Args:
        x: a tensor of the same shape and type on every rank.
        op: `"Sum"`, `"Product"`, `"Min"` or `"Max"`.
        ranks: the group's, in its order.
        name: the same on every rank, and no other collective's that is under way.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=x, merge_op=_MERGES[op], final_op="Id", **_key(ranks, name)
    )


def all_gather(x: tf.Tensor, ranks: tuple[int, ...], name: str) -> tf.Tensor:
    """Return the ranks' tensors [...] as rows [d, ...], in the group's order; see `all_reduce`."""
    rows = tf.raw_ops.CollectiveGatherV2(input=x[None], **_key(ranks, name))
    rows.set_shape([len(ranks), *x.shape])
    return rows


def all_to_all(rows: tf.Tensor, ranks: tuple[int, ...], name: str) -> tf.Tensor:
    """Send row i of [d, ...] to position i; return what comes; see `all_reduce`."""
    received = tf.raw_ops.CollectiveAllToAllV2(input=rows, **_key(ranks, name))
    received.set_shape(rows.shape)
    return received


def _key(ranks, name):
    """Return what the kernels pair the ranks' operations by: as Horovod, a name in its scope."""
    if not tf.executing_eagerly() and not trace.current().names_are_global:
        name = tf.compat.v1.get_default_graph().unique_name(name)
    return {
        "group_size": len(ranks),
        "group_key": key_of(ranks),
        "instance_key": zlib.crc32(name.encode()) & 0x7FFFFFFF,
        "ordering_token": [],
    }
