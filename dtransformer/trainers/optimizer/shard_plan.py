"""Shard plan of the optimizer step: what this rank stores of each weight, and who updates it."""

import dataclasses
import math

import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.variable import MeshVariable, share_of, unshard
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import (
    full_bounds,
    is_unsharded_for_use,
    own_shards,
    shard_bounds_of,
    true_shape,
)
from dtransformer.parallel.zero.partition import Parameter, Partition
from dtransformer.parallel.zero.variables import FlatShardedVariable, MasterShardedVariable
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy


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


# Optimizer parameters: what the Keras optimizer updates on this rank.


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerParameter:
    """A variable that the optimizer updates on this rank.

    Args:
        parameter: what the optimizer is given: a stored shard, or a `ParameterProxy`.
        positions: tuple of the positions of the shards that it is made of.
        weight: the Keras variable that it is, or is a part of.
        bounds, flat_range: where it lies in the weight; see `shard_bounds_of`.
    """

    parameter: object
    positions: tuple
    weight: object
    bounds: tuple
    flat_range: tuple | None

    @property
    def is_held(self):
        """Whether its value is handed in, and its new value handed out."""
        return isinstance(self.parameter, ParameterProxy)


class OptimizerParameters:
    """The units of all shards of this rank.

    Args:
        shards: list of `PlannedShard`s.
        kind: of the partition, `"flat"` or `"whole"`.

    Attributes:
        units: list of `OptimizerParameter`s, none for what other ranks update.
        parameters: list of what the optimizer is given.
    """

    def __init__(self, shards, kind):
        self._shards, self._group = shards, job.data_parallel_group()
        of_weights = {}
        for position, one in enumerate(shards):
            of_weights.setdefault(one.number, []).append(position)
        self.units, self._of_mesh = [], []
        for positions in of_weights.values():
            if kind == "whole" and is_made_whole(shards[positions[0]].weight):
                own = [self._made_whole(positions)] if self._updates(positions[0]) else []
                self._of_mesh += own
            else:
                own = [self._of_shard(i, kind) for i in positions if self._updates(i)]
            self.units += own
        self.parameters = [unit.parameter for unit in self.units]

    def _updates(self, position):
        division = self._shards[position].division
        return division is None or division.sizes[self._group.index] > 0

    def _of_shard(self, position, kind):
        one = self._shards[position]
        parameter, flat_range = one.shard, one.flat_range
        if kind == "flat" and one.is_sharded and flat_range is None:
            parameter = ParameterProxy(one.shard, (one.division.sizes[self._group.index],))
            flat_range = one.division.range_of(self._group.index)
        return OptimizerParameter(parameter, (position,), one.weight, one.bounds, flat_range)

    def _made_whole(self, positions):
        one = self._shards[positions[0]]
        shape = true_shape(one.weight)
        parameter = ParameterProxy(one.shard, shape, one.weight.constraint)
        return OptimizerParameter(parameter, tuple(positions), one.weight, full_bounds(shape), None)

    def gradients(self, gradients):
        """Return the units' gradients, tensors of their shapes, of those of all shards."""
        full = self._unsharded(gradients, "gradients_over_the_mesh")
        own = [full.get(unit, gradients[unit.positions[0]]) for unit in self.units]
        return [
            x if x.shape == unit.parameter.shape else tf.reshape(x, unit.parameter.shape)
            for x, unit in zip(own, self.units)
        ]

    def held_values(self):
        """Return the values of the `ParameterProxy`s among the units, in their order."""
        values = {
            i: tf.convert_to_tensor(self._shards[i].shard.value)
            for unit in self.units
            for i in unit.positions
            if unit.is_held
        }
        full = self._unsharded(values, "values_over_the_mesh")
        found = []
        for unit in self.units:
            if unit in full:
                found.append(full[unit])
            elif unit.is_held:
                i = unit.positions[0]
                division = self._shards[i].division
                found.append(flat_shards.own_shard(values[i], self._group, division))
        return found

    def new_values(self, held):
        """Return this rank's parts of the shards' new values, flat, by the shards' positions.

        Of shards that other ranks update it has nothing, tensors [0]. What is in no `replicated`
        variable and in no `ParameterProxy` has changed already, and is left out.

        Args:
            held: new values of the `ParameterProxy`s, as `held_values` returns the old ones.
        """
        new, held = {}, iter(held)
        for unit in self.units:
            value = next(held) if unit.is_held else unit.parameter.value
            for i in unit.positions:
                one = self._shards[i]
                if one.replicated is None and not unit.is_held:
                    continue
                own = value
                if unit in self._of_mesh:
                    own = _padded(value, one.weight.shape)[_index(one.bounds)]
                new[i] = tf.reshape(own, [-1])
        for i, one in enumerate(self._shards):
            if one.replicated is not None:
                new.setdefault(i, tf.zeros([0], one.shard.value.dtype))
        return new

    def _unsharded(self, tensors, name):
        """Return {unit: full tensor, without padding} of the units that are made whole."""
        weights = [unit.weight for unit in self._of_mesh]
        own = [
            tf.concat([tf.reshape(tensors[i], [-1]) for i in unit.positions], 0)
            for unit in self._of_mesh
        ]
        full = by_dtype(
            lambda shards, weights, dtype: unshard(weights, shards, f"{name}_{dtype}"), own, weights
        )
        return {
            unit: value[_index(full_bounds(unit.parameter.shape))]
            for unit, value in zip(self._of_mesh, full)
        }


def _padded(value, shape):
    return tf.pad(value, [(0, size - own) for size, own in zip(shape, value.shape)])


def _index(bounds):
    return tuple(slice(start, stop) for start, stop in bounds)
