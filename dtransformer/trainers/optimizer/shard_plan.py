"""Shard plan of the optimizer step: what this rank stores of each weight, and who updates it."""

import dataclasses
import math

import tensorflow as tf

from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.variable import MeshVariable, share_of
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import (
    is_unsharded_for_use,
    own_shards,
    shard_bounds_of,
)
from dtransformer.parallel.zero.partition import Parameter, Partition
from dtransformer.parallel.zero.variables import (
    FlatShardedVariable,
    MasterShardedVariable,
)


@dataclasses.dataclass(frozen=True)
class PlannedShard:
    """A shard of a weight that this rank stores, and what becomes of it in an update.

    Args:
        weight: the Keras variable that is trained.
        number: its number among all that are.
        shard: what this rank stores of it, an ordinary Keras variable.
        division: how the ranks of the data-parallel group divide the update of what `shard`
            is, or is a part of; None where each does the same.
        replicated: the variable that the new values of all ranks are all-gathered to; None where
            they are in `shard` alone.
        comes_reduced: whether its gradients come as sums over that group.
        norm_share: 1 over the number of the mesh's ranks that have the same shard; None where
            every rank has the full weight.
        counts: whether it counts in the norm of all gradients, as copies of what another
            pipeline stage has do not.
        bounds, flat_range: where `shard` lies in the weight; see `shard_bounds_of`.
    """

    weight: object
    number: int
    shard: object
    division: Division | None
    replicated: object
    comes_reduced: bool
    norm_share: float | None
    counts: bool
    bounds: tuple
    flat_range: tuple | None

    @property
    def is_sharded(self):
        """Whether the ranks of the data-parallel group update parts of their own."""
        return self.division is not None

    @property
    def gradient_shape(self):
        """The shape of the gradient as an engine gives it."""
        return self.shard.shape if self.replicated is None else self.replicated.shape


def shard_plan(weights, partition, copies=()):
    """Return the list of `PlannedShard`s of weights.

    Args:
        weights: list of the Keras variables that are trained.
        partition: their `Partition`.
        copies: those that another pipeline stage has, too, and counts.
    """
    is_copy = {id(weight) for weight in copies}
    stored = [
        (weight, number, shard, place)
        for number, weight in enumerate(weights)
        for shard, place in zip(own_shards([weight]), shard_bounds_of(weight), strict=True)
    ]
    found = []
    for (weight, number, shard, place), row in zip(stored, partition.parameters, strict=True):
        replicated = None
        if isinstance(weight, MasterShardedVariable):
            replicated = weight.copy
        elif row.division is not None and not isinstance(weight, FlatShardedVariable):
            replicated = shard.value
        found.append(
            PlannedShard(
                weight=weight,
                number=number,
                shard=shard,
                division=row.division,
                replicated=replicated,
                comes_reduced=is_unsharded_for_use(weight),
                norm_share=share_of(weight),
                counts=id(weight) not in is_copy,
                bounds=place[0],
                flat_range=place[1],
            )
        )
    return found


def partition_of(weights):
    """Return the `Partition` of a list of weights under the current config."""
    group = job.data_parallel_group()
    described = [
        Parameter(
            weight.path,
            tuple(part.shape),
            tf.as_dtype(part.dtype).size,
            weight.constraint is not None,
            updates,
        )
        for weight in weights
        for part, updates in _parts(weight)
    ]
    return Partition.of(described, get_parallel_config(), group.size, group.index)


def _parts(weight):
    """Return what this rank stores of a weight, and how many elements are updated for each part."""
    if isinstance(weight, FlatShardedVariable):
        return [(weight, None)]
    shards = own_shards([weight])
    if get_parallel_config().optimizer_shard_partition == "flat" or not is_made_whole(weight):
        return [(shard, None) for shard in shards]
    return [(shard, 0 if i else math.prod(true_shape(weight))) for i, shard in enumerate(shards)]


def is_made_whole(weight):
    """Return whether a whole partition has to make a weight whole: a mesh may pad and shard it."""
    return isinstance(weight, MeshVariable)


def true_shape(weight):
    """Return the shape of a full weight without the padding of a vocabulary."""
    return tuple(getattr(weight, "true_shape", weight.shape))
