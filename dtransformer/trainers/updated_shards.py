"""What this rank updates of each weight: a plan that the optimizer step carries out."""

import dataclasses

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.dtensor.variable import share_of
from dtransformer.parallel.sharded_variable import (
    is_unsharded_for_use,
    own_shards,
    shard_bounds_of,
)
from dtransformer.parallel.zero.flat_parameter import FlatParameter
from dtransformer.parallel.zero.partition import Partition
from dtransformer.parallel.zero.variables import (
    FlatShardedVariable,
    MasterShardedVariable,
)


@dataclasses.dataclass(frozen=True)
class UpdatedShard:
    """A shard that this rank updates, or a part of one.

    Args:
        weight: the Keras variable that is trained.
        number: its number among all that are.
        shard: what this rank stores of it, an ordinary Keras variable.
        unit: what the optimizer updates: `shard`, or a `FlatParameter` that is a flat part of it.
        replicated: the variable that the new values of all ranks are all-gathered to; None where
            `unit` is all that there is.
        is_sharded: whether the ranks of the data-parallel group update parts of their own.
        comes_reduced: whether its gradients come as sums over that group.
        norm_share: 1 over the number of the mesh's ranks that have the same shard; None where
            every rank has the full weight.
        counts: whether it counts in the norm of all gradients, as copies of what another
            pipeline stage has do not.
        bounds: where `shard` lies in the weight: a tuple of (start, stop), one a dimension.
        flat_range: (start, stop) of `unit` in the flattened `shard`; None where it is all.
    """

    weight: object
    number: int
    shard: object
    unit: object
    replicated: object
    is_sharded: bool
    comes_reduced: bool
    norm_share: float | None
    counts: bool
    bounds: tuple
    flat_range: tuple | None

    @property
    def is_flat(self):
        """Whether the optimizer updates a flat part of what this rank stores."""
        return isinstance(self.unit, FlatParameter)

    @property
    def gradient_shape(self):
        """The shape of the gradient as an engine gives it."""
        return self.shard.shape if self.replicated is None else self.replicated.shape


def updated_shards(weights, partition, copies=()):
    """Return the list of `UpdatedShard`s of weights.

    Args:
        weights: list of the Keras variables that are trained.
        partition: their `Partition`.
        copies: those that another pipeline stage has, too, and counts.
    """
    is_copy = {id(weight) for weight in copies}
    group = job.data_parallel_group()
    stored = [
        (weight, number, shard, place)
        for number, weight in enumerate(weights)
        for shard, place in zip(own_shards([weight]), shard_bounds_of(weight), strict=True)
    ]
    found = []
    for (weight, number, shard, place), row in zip(stored, partition.parameters, strict=True):
        is_sharded = row.num_shards > 1
        bounds, flat_range = place
        unit, replicated = shard, None
        if is_sharded and not isinstance(weight, FlatShardedVariable):
            unit, replicated = FlatParameter(shard, row.shard_elements), shard.value
            flat_range = flat_shards.own_range(row.shard_elements, group)
        elif isinstance(weight, MasterShardedVariable):
            replicated = weight.copy
        found.append(
            UpdatedShard(
                weight=weight,
                number=number,
                shard=shard,
                unit=unit,
                replicated=replicated,
                is_sharded=is_sharded,
                comes_reduced=is_unsharded_for_use(weight),
                norm_share=share_of(weight),
                counts=id(weight) not in is_copy,
                bounds=bounds,
                flat_range=flat_range,
            )
        )
    return found


def partition_of(weights):
    """Return the `Partition` of a list of weights under the current config."""
    described = [
        (weight.path, part.shape, tf.as_dtype(part.dtype).size, weight.constraint is not None)
        for weight in weights
        for part in ([weight] if isinstance(weight, FlatShardedVariable) else own_shards([weight]))
    ]
    return Partition.of(described, get_parallel_config(), job.data_parallel_group().size)
