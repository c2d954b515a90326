"""Calls of StableHLO modules. On a mesh each device calls the module with its local shards.

DTensor does not change operations on tensors with a "parted" layout. They receive and return local
shards, without communication.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    constrain,
    make_layout,
    relayout,
)
from dtransformer.parallel.ops import gpu_calls
from dtransformer.parallel.tracing import trace


def local_shape(shape: Sequence[int], axes: tuple) -> tuple[int, ...]:
    """Return the shape of a device's shard of a tensor. Without a mesh it is `shape`.

    Args:
        shape: Sequence of integers.
        axes: Tuple with the logical axis of each dimension, or `None`, see `constrain`.
    """
    if not trace.is_on_mesh():
        return tuple(shape)
    specs = activation_specs(axes, shape)
    return tuple(size // axis_size(spec) for size, spec in zip(shape, specs))


def call_on_shards(
    module: str, operands: list[tuple], results: list[tuple], target: str
) -> list[tf.Tensor]:
    """Return the results of a StableHLO module for the local shards of tensors.

    Without a mesh, the surrounding function must be compiled by XLA, see `gpu_calls.compiled`.

    Args:
        module: Text of the module, with local shapes. See `call_stablehlo`.
        operands: List of `(tensor, axes)` tuples. `axes` has the logical axis of each dimension, or
            `None`, see `constrain`.
        results: List of `(like, axes)` tuples. The result has the type and the global shape of the
            tensor `like`.
        target: Name of the custom call in the module.
    """
    if not trace.is_on_mesh():
        types = [(x.shape, x.dtype) for x, _ in results]
        return _compat.call_stablehlo(module, [x for x, _ in operands], types, target)
    with gpu_calls.compiled_cluster():
        shards = [_parted(x, axes) for x, axes in operands]
        types = [([None] * x.shape.rank, x.dtype) for x, _ in results]
        outputs = _compat.call_stablehlo(module, shards, types, target)
        tensors = []
        for y, (like, axes) in zip(outputs, results, strict=True):
            # The sum with zeros gives the result its global shape and its layout. XLA removes it.
            # `tf.zeros_like` would store a constant.
            zeros = tf.raw_ops.ZerosLike(x=_parted(like, axes))
            tensors.append(constrain(tf.add_n([y, zeros]), axes))
    return tensors


def _parted(x, axes):
    """Return x with a layout that makes operations compute with local shards."""
    specs = activation_specs(axes, x.shape)
    return dtensor.relayout(relayout(x, specs), make_layout(specs).to_parted())
