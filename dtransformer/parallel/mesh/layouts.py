"""Layouts of tensors on the mesh."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.runtime import job


def axis_size(axis: str | None) -> int:
    """Return the number of shards along a mesh axis; 1 for None."""
    return 1 if axis is None else job.mesh().dim_size(axis)


def make_layout(specs: Sequence[str | None]) -> dtensor.Layout:
    """Return the DTensor layout with a mesh axis, or None, for every dimension."""
    return dtensor.Layout([spec or dtensor.UNSHARDED for spec in specs], job.mesh())


def relayout(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """Change a tensor's layout on the mesh to a mesh axis, or None, for every dimension.

    Where an axis moves from one dimension to another, one of them has to be the first one if there
    are four or more: DTensor's all-to-all gives wrong numbers between the others.
    """
    return dtensor.relayout(x, make_layout(specs))


def laid_out(x: tf.Tensor, specs: Sequence[str | None]) -> tf.Tensor:
    """As `relayout`, of a tensor that as a rule is laid out so already: its gradient is, too.

    `relayout` lays the gradient out like the tensor, which functions keep for it.
    """

    @custom_gradient
    def put(x):
        return relayout(x, specs), lambda dy: relayout(dy, specs)

    return put(x)


def replicate(tensors):
    """Let every device have all of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else relayout(x, (None,) * len(x.shape)), tensors
    )
