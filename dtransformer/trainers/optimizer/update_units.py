"""Update units: the variables that the Keras optimizer updates on this rank."""

import dataclasses

import keras
import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.mesh.variable import MeshVariable, unshard
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import full_bounds, true_shape
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateUnit:
    """A variable that the optimizer updates on this rank.

    Args:
        parameter: Parameter of the Keras optimizer: a stored shard, or a `ParameterProxy` for a
            flat part of a shard or for a full weight whose shards are on a mesh.
        positions: Tuple of ints. Positions of its shards in the shard plan.
        weight: Keras variable that the unit is a part of.
        bounds, flat_range: Location in the weight; see `get_shard_bounds`.
    """

    parameter: keras.Variable | ParameterProxy
    positions: tuple
    weight: keras.Variable
    bounds: tuple
    flat_range: tuple | None

    @property
    def is_proxy(self):
        """True if an update receives and returns the value instead of assigning a variable."""
        return isinstance(self.parameter, ParameterProxy)


class UpdateUnits:
    """Update units of a rank, and their exchange with the shards of the plan.

    Args:
        shards: List of `PlannedShard`s.
        kind: `"flat"` or `"whole"`, the partition's kind. With `"whole"`, the owner of a weight on
            a mesh updates its full value.

    Attributes:
        shards: List of `PlannedShard`s.
        units: List of the `UpdateUnit`s of this rank.
        proxies: List of the units with a `ParameterProxy`.
    """

    def __init__(self, shards, kind):
        self.shards = shards
        self.units = []
        self._group = job.data_parallel_group()
        self._unsharded = []
        positions_by_weight = {}
        for i, shard in enumerate(shards):
            if shard.division is None or shard.division.sizes[self._group.index] > 0:
                positions_by_weight.setdefault(shard.weight_index, []).append(i)
        for positions in positions_by_weight.values():
            if kind == "whole" and isinstance(shards[positions[0]].weight, MeshVariable):
                unit = _unsharded_unit(shards[positions[0]], positions)
                self._unsharded.append(unit)
                self.units.append(unit)
            else:
                self.units += [self._shard_unit(i, kind) for i in positions]
        self.proxies = [unit for unit in self.units if unit.is_proxy]

    def _shard_unit(self, position, kind):
        shard = self.shards[position]
        parameter = shard.shard
        flat_range = shard.flat_range
        if kind == "flat" and shard.division is not None and flat_range is None:
            flat_range = shard.division.get_range(self._group.index)
            parameter = ParameterProxy(shard.shard, (flat_range[1] - flat_range[0],))
        return UpdateUnit(parameter, (position,), shard.weight, shard.bounds, flat_range)

    def gradients(self, gradients):
        """Return the gradients of the units, given the gradients of all shards of the plan."""
        full = self._unshard(gradients, "gradients_over_the_mesh")
        result = []
        for unit in self.units:
            gradient = full[unit] if unit in full else gradients[unit.positions[0]]
            shape = unit.parameter.shape
            result.append(gradient if gradient.shape == shape else tf.reshape(gradient, shape))
        return result

    def proxy_values(self):
        """Return the current values of `proxies`."""
        stored = {
            i: tf.convert_to_tensor(self.shards[i].shard.value)
            for unit in self.proxies
            for i in unit.positions
        }
        values = self._unshard(stored, "values_over_the_mesh")
        for unit in self.proxies:
            if unit not in values:
                i = unit.positions[0]
                division = self.shards[i].division
                values[unit] = flat_shards.get_local_shard(stored[i], self._group, division)
        return [values[unit] for unit in self.proxies]

    def new_parts(self, values):
        """Return the new values that an update has not assigned.

        Args:
            values: List of tensors. New values of `proxies`.

        Returns:
            A dict from positions in the shard plan to flat tensors. It contains the local parts of
            all replicated shards, empty if another rank updates the shard, and the shards of
            `proxies`.
        """
        parts = {
            i: tf.zeros([0], shard.shard.value.dtype)
            for i, shard in enumerate(self.shards)
            if shard.replicated is not None
        }
        new_values = dict(zip(self.proxies, values))
        for unit in self.units:
            value = new_values[unit] if unit.is_proxy else unit.parameter.value
            for i in unit.positions:
                part = value
                if unit in self._unsharded:
                    part = _padded(value, unit.weight.shape)[_slices(self.shards[i].bounds)]
                if unit.is_proxy or i in parts:
                    parts[i] = tf.reshape(part, [-1])
        return parts

    def _unshard(self, tensors, name):
        """Return a dict from unsharded units to full tensors without padding.

        Args:
            tensors: List or dict with the local tensor of each position in the shard plan.
            name: Name of the collective over the mesh.
        """
        packed = []
        for unit in self._unsharded:
            packed.append(tf.concat([tf.reshape(tensors[i], [-1]) for i in unit.positions], 0))
        full = by_dtype(
            lambda shards, weights, dtype: unshard(weights, shards, f"{name}_{dtype}"),
            packed,
            [unit.weight for unit in self._unsharded],
        )
        return {unit: value[_slices(unit.bounds)] for unit, value in zip(self._unsharded, full)}


def _unsharded_unit(shard, positions):
    weight = shard.weight
    shape = true_shape(weight)
    parameter = ParameterProxy(shard.shard, shape, weight.constraint, weight)
    return UpdateUnit(parameter, tuple(positions), weight, full_bounds(shape), None)


def _padded(value, shape):
    return tf.pad(value, [(0, full - size) for full, size in zip(shape, value.shape)])


def _slices(bounds):
    return tuple(slice(start, stop) for start, stop in bounds)
