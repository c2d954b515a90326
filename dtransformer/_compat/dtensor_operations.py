"""Operations that DTensor computes incorrectly or that end the process."""

import contextlib
import numbers
import types
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import array_ops

_BASIC_INDICES = numbers.Integral, slice, types.EllipsisType, types.NoneType


@contextlib.contextmanager
def repaired_operations(replicate: Callable):
    """Context manager that corrects operations of layers on a mesh.

    Unnecessary if DTensor fixed these faults:

    - `x[None]` without the other dimensions, and `tf.where` with a scalar condition, end the
      process.
    - `x[::-1]` reverses the order within each shard.
    - `x[0]` of four or more dimensions has wrong values if the second dimension is sharded.
    - `tf.scatter_nd` shards its result but keeps global indices, so CPUs raise an error and GPUs
      ignore the values. The gradients of `tf.gather_nd`, `tf.math.top_k` and `tf.sort` call it.

    Args:
        replicate: Function that replicates a DTensor and its gradient.
    """
    index_tensor = tf.Tensor.__getitem__
    scatter_nd = tf.scatter_nd
    where = tf.where

    def index_explicitly(x, index):
        parts = index if isinstance(index, tuple) else (index,)
        rank = x.shape.rank
        if rank is None or not all(isinstance(part, _BASIC_INDICES) for part in parts):
            return index_tensor(x, index)
        parts, scalars = _explicit_indices(parts, rank)
        x = _gather_reversed(x, parts)
        y = index_tensor(x, tuple(parts))
        return tf.squeeze(y, scalars) if scalars else y

    def scatter_replicated(*args, **kwargs):
        return replicate(scatter_nd(*args, **kwargs))

    def where_with_dimensions(condition, x=None, y=None, name=None):
        condition = tf.convert_to_tensor(condition)
        if x is not None and condition.shape.rank == 0:
            condition = tf.reshape(condition, [1])
        return where(condition, x, y, name)

    replacements = [
        (tf.Tensor, "__getitem__", index_explicitly),
        (tf, "scatter_nd", scatter_replicated),
        (array_ops, "scatter_nd", scatter_replicated),
        (tf, "where", where_with_dimensions),
        (array_ops, "where_v2", where_with_dimensions),
    ]
    with contextlib.ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(_replaced(*replacement))
        yield


@contextlib.contextmanager
def _replaced(owner, name, function):
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _gather_reversed(x, parts):
    """Gather the dimensions of a tensor whose slices have a negative step.

    The parts of these dimensions become full slices.
    """
    dimensions = [i for i, part in enumerate(parts) if part is not None]
    for axis, i in enumerate(dimensions):
        step = getattr(parts[i], "step", None)
        if isinstance(step, numbers.Integral) and step < 0:
            positions = range(x.shape[axis])[parts[i]]
            x = tf.gather(x, positions, axis=axis)
            parts[i] = slice(None)
    return x


def _explicit_indices(parts, rank):
    """Return indices of all dimensions as a list, and the positions in it to squeeze."""
    named = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts = (*parts, Ellipsis)
    explicit = []
    scalars = []
    for part in parts:
        if part is Ellipsis:
            explicit += [slice(None)] * (rank - named)
        elif rank >= 4 and isinstance(part, numbers.Integral):
            scalars.append(len(explicit))
            explicit.append(slice(part, part + 1 or None))
        else:
            explicit.append(part)
    return explicit, scalars
