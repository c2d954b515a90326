"""Shard plan of the optimizer step: the stored shards of each weight and the ranks that update them."""

import dataclasses
import math

import keras
import tensorflow as tf

from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.variable import MeshVariable, get_mesh_fraction
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import (
    get_local_shards,
    get_shard_bounds,
    is_unsharded_for_use,
    true_shape,
)
from dtransformer.parallel.zero.partition import Parameter, Partition
from dtransformer.parallel.zero.variables import FlatShardedVariable, MasterShardedVariable


@dataclasses.dataclass(frozen=True)
class PlannedShard:
    """A shard of a weight that this rank stores, and its role in an update.

    Args:
        weight: Trainable Keras variable.
        weight_index: Integer. Index of the weight in the list of trainable weights.
        shard: Keras variable of the stored shard. For an unsharded weight, the weight itself.
        division: `Division` of the update over the data-parallel group. `None` if each rank updates
            all of `shard`.
        replicated: `tf.Variable` that receives the all-gathered new values. `None` if all new values
            belong to `shard`.
        is_reduced: Boolean. Whether the engine returns gradients already summed over the group.
        mesh_fraction: Float. 1 / number of the mesh's ranks that store the same shard. `None` if
            all of them store the full weight.
        counts_in_norm: Boolean. Whether this rank counts the gradient in the global norm. `False`
            for copies of weights that another pipeline stage counts.
        bounds, flat_range: Location of `shard` in the weight; see `get_shard_bounds`.
    """

    weight: keras.Variable
    weight_index: int
    shard: keras.Variable
    division: Division | None
    replicated: tf.Variable | None
    is_reduced: bool
    mesh_fraction: float | None
    counts_in_norm: bool
    bounds: tuple
    flat_range: tuple | None


def shard_plan(weights, partition, copies=()):
    """Return the `PlannedShard`s of weights, in the order of the weights.

    Args:
        weights: List of trainable Keras variables.
        partition: `Partition` of the weights.
        copies: Weights that another pipeline stage also stores and counts in the global norm.
    """
    copy_ids = {id(weight) for weight in copies}
    rows = iter(partition.parameters)
    plan = []
    for index, weight in enumerate(weights):
        for shard, location in zip(
            get_local_shards([weight]), get_shard_bounds(weight), strict=True
        ):
            division = next(rows).division
            plan.append(
                PlannedShard(
                    weight=weight,
                    weight_index=index,
                    shard=shard,
                    division=division,
                    replicated=_replicated(weight, shard, division),
                    is_reduced=is_unsharded_for_use(weight),
                    mesh_fraction=get_mesh_fraction(weight),
                    counts_in_norm=id(weight) not in copy_ids,
                    bounds=location[0],
                    flat_range=location[1],
                )
            )
    return plan


def _replicated(weight, shard, division):
    if isinstance(weight, MasterShardedVariable):
        return weight.copy
    if division is None or isinstance(weight, FlatShardedVariable):
        return None
    return shard.value


def make_partition(weights):
    """Return the `Partition` of weights under the current config."""
    group = job.data_parallel_group()
    parameters = [
        Parameter(
            weight.path,
            tuple(shard.shape),
            tf.as_dtype(shard.dtype).size,
            weight.constraint is not None,
            num_updated,
        )
        for weight in weights
        for shard, num_updated in _stored_parts(weight)
    ]
    return Partition.from_weights(parameters, get_parallel_config(), group.size, group.index)


def _stored_parts(weight):
    """Return `(part, num_updated)` tuples: stored parts and `Parameter.updates` of each."""
    if isinstance(weight, FlatShardedVariable):
        return [(weight, None)]
    shards = get_local_shards([weight])
    is_flat = get_parallel_config().optimizer_shard_partition == "flat"
    if is_flat or not isinstance(weight, MeshVariable):
        return [(shard, None) for shard in shards]
    # The owner updates the full weight without padding. The first shard counts all elements.
    num_updated = math.prod(true_shape(weight))
    return [(shard, 0 if i else num_updated) for i, shard in enumerate(shards)]
