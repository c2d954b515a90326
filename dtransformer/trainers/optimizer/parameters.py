"""Optimizer parameters: what the Keras optimizer updates on this rank.

A shard as it is stored; a flat part of one, for its value's time; or a weight of the mesh made whole:
its shards' gradients and values are all-gathered over the mesh, every rank of the mesh updates
all of it, and keeps its shards of the result.
"""

import dataclasses

import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.mesh.variable import unshard
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import full_bounds
from dtransformer.parallel.zero.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.shard_plan import is_made_whole, true_shape


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
