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
    """Context manager in which the operations of layers compute correct results on a mesh.

    Unnecessary if DTensor had none of these faults:

    - `x[None]` without the other dimensions, and `tf.where` with a scalar condition, end the
      process.
    - With a negative step, as in `x[::-1]`, each device reverses its own shard.
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
        is_reversed = any(_has_negative_step(part) for part in parts)
        if is_reversed:
            x = replicate(x)
        y = index_tensor(x, tuple(parts))
        if scalars:
            y = tf.squeeze(y, scalars)
        return replicate(y) if is_reversed else y

    def scatter_replicated(*args, **kwargs):
        return replicate(scatter_nd(*args, **kwargs))

    def where_with_dimensions(condition, x=None, y=None, name=None):
        if x is not None and tf.convert_to_tensor(condition).shape.rank == 0:
            condition = tf.reshape(condition, [1])
        return where(condition, x, y, name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(tf.Tensor, "__getitem__", index_explicitly))
        for module, name in ((tf, "where"), (array_ops, "where_v2")):
            stack.enter_context(_replaced(module, name, where_with_dimensions))
        for module in (tf, array_ops):
            stack.enter_context(_replaced(module, "scatter_nd", scatter_replicated))
        yield


@contextlib.contextmanager
def _replaced(owner, name, function):
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _has_negative_step(part):
    return isinstance(part, slice) and isinstance(part.step, int) and part.step < 0


def _explicit_indices(parts, rank):
    """Return a list of indices for all dimensions, and the positions in it that must be squeezed."""
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
