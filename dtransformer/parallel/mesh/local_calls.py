"""Calls of StableHLO modules. On a mesh each device calls the module with its local shards.

DTensor computes nothing for tensors in a "parted" layout: operations receive and return local
shards, so neither a layout nor a collective is derived for the call.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
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
        results: List of `(shape, dtype, axes)` tuples with the results' global shapes.
        target: Name of the custom call in the module.
    """
    tensors = [x for x, _ in operands]
    if not trace.is_on_mesh():
        types = [(shape, dtype) for shape, dtype, _ in results]
        return _compat.call_stablehlo(module, tensors, types, target)
    with gpu_calls.compiled_cluster():
        shards = [_parted(x, activation_specs(axes, x.shape)) for x, axes in operands]
        types = [([None] * len(shape), dtype) for shape, dtype, _ in results]
        outputs = _compat.call_stablehlo(module, shards, types, target)
        tensors = []
        for y, (shape, dtype, axes) in zip(outputs, results, strict=True):
            specs = activation_specs(axes, shape)
            # The sum with zeros gives the result its global shape and its layout.
            zeros = _parted(tf.zeros(shape, dtype), specs)
            tensors.append(relayout(tf.add_n([y, zeros]), specs))
    return tensors


def _parted(x, specs):
    """Return x with a layout that makes operations compute with local shards."""
    return dtensor.relayout(relayout(x, specs), make_layout(specs).to_parted())
