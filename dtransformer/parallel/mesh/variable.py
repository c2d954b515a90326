"""Variables sharded over the mesh. Each rank stores its local shards.

A shard is an ordinary Keras variable on one of this rank's devices, and an ordinary optimizer
updates it. For a computation on the mesh, the shards of a variable are packed into one DTensor
without a copy.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.mesh.axis_rules import axis_size, make_layout, relayout
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import get_shape
from dtransformer.parallel.weights.sharded_variable import ShardBounds, ShardedVariable, StoredValue


class MeshVariable(ShardedVariable):
    """Keras variable with a shard on each device of the mesh.

    Its shape is the full shape. Computations on the mesh read it as a DTensor.

    Args:
        initializer: Function of `(shape, dtype)` that returns the full value. It runs in host
            memory, and devices only get their shards.
        specs: Tuple with the mesh axis that shards each dimension, or `None`.
        specs_in_use: Specs of the value that computations read. Extra axes of `specs` are
            all-gathered on read. Defaults to `specs`.
        **kwargs: Arguments of `keras.Variable`.

    Attributes:
        specs: See Args.
        specs_in_use: See Args.
        shards: List of the distinct shards on this rank's devices, as ordinary Keras variables. If
            several devices of the rank have the same shard, the variable is on the first one.
    """

    def __init__(
        self,
        initializer: Callable,
        *,
        specs: tuple[str | None, ...],
        specs_in_use: tuple[str | None, ...] | None = None,
        **kwargs,
    ):
        self.specs = specs
        self.specs_in_use = specs_in_use or specs
        super().__init__(initializer, **kwargs)

    def _initialize_with_initializer(self, initializer):
        self.local = LocalShards(self._shape, self.specs)
        with tf.device("CPU:0"):
            if isinstance(initializer, StoredValue):

                def part(bounds):
                    return initializer.rectangle(bounds, self._dtype)

            else:
                value = np.asarray(initializer(self._shape, dtype=self._dtype))

                def part(bounds):
                    return value[bounds.slices]

        self.shards = []
        for bounds, device in zip(self.local.distinct, self.local.first_devices):
            with tf.device(device):
                self.shards.append(
                    keras.Variable(
                        part(bounds), dtype=self._dtype, trainable=self.trainable, name=self.name
                    )
                )
        self._value = None

    @property
    def shard_bounds(self) -> list[ShardBounds]:
        return [(tuple(bounds), None) for bounds in self.local.distinct]

    def _read(self):
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is sharded over the mesh and can only be read there. Call the network "
                "through its Trainer (`fit`, `evaluate`, `predict`) or through `generate`."
            )
        with tf.device("CPU:0"):
            return self._maybe_autocast(tf.constant(self.numpy()))

    def _as_used(self, value):
        return value if self.specs == self.specs_in_use else relayout(value, self.specs_in_use)

    @property
    def trained_value(self) -> tf.Tensor:
        """Value in its stored layout, inside a computation on the mesh."""
        return _compat.stateless_value(self)

    def _direct_assign(self, value):
        value = np.asarray(value)
        for shard, bounds in zip(self.shards, self.local.distinct):
            shard.assign(value[bounds.slices])

    def numpy(self) -> np.ndarray:
        """Return the full value. All ranks of the mesh must call this together."""
        if self._unsharded is not None:
            return self._unsharded
        with tf.device("CPU:0"):
            flat = np.concatenate([np.reshape(shard.numpy(), [-1]) for shard in self.shards])
            return unshard([self], [tf.constant(flat)], f"gather.{self.path}")[0].numpy()


def shard_in_place(
    variable: keras.Variable, specs: Sequence[str | None], specs_in_use: Sequence[str | None]
) -> None:
    """Turn a Keras variable into a `MeshVariable` with the same value.

    Layers, tied layers and lists keep their references, because the object stays the same.

    Args:
        variable: Initialized variable of a Keras layer. It is stored on one device.
        specs, specs_in_use: As in `MeshVariable`.
    """
    value = np.asarray(variable.numpy())
    variable.__class__ = MeshVariable
    variable.specs = tuple(specs)
    variable.specs_in_use = tuple(specs_in_use)
    _compat.initialize_variable(variable, lambda shape, dtype: value)


class _Bounds(tuple):
    """Position of a shard: a hashable tuple of `(start, stop)` for each dimension."""

    @property
    def slices(self):
        """Index of the shard in the full tensor."""
        return tuple(slice(start, stop) for start, stop in self)


class LocalShards:
    """Distinct shards of a DTensor on this rank's devices.

    Args:
        shape: Full shape.
        specs: Tuple with the mesh axis that shards each dimension, or `None`.

    Attributes:
        distinct: List of the hashable bounds of the shards. `slices` of the bounds index the full
            tensor.
        first_devices: List with the first local device of each shard.
        shapes: List of the shapes of the shards.
    """

    def __init__(self, shape: Sequence[int], specs: Sequence[str | None]):
        mesh = job.mesh()
        device_bounds = get_device_bounds(shape, specs, mesh.local_device_ids())
        self._pack = _compat.packer(make_layout(specs))
        self.distinct = list(dict.fromkeys(device_bounds))
        shard_indices = [self.distinct.index(bounds) for bounds in device_bounds]
        # The local devices and the indices of their shards.
        self._device_shards = list(zip(mesh.local_devices(), shard_indices))
        self._first_indices = [shard_indices.index(index) for index in range(len(self.distinct))]
        self.first_devices = [mesh.local_devices()[first] for first in self._first_indices]
        self.shapes = list(map(get_shape, self.distinct))

    def pack(self, shards: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a DTensor of shards: tensors or variables in the order of `distinct`."""
        values = [tf.convert_to_tensor(shard) for shard in shards]
        on_devices = []
        for device, index in self._device_shards:
            value = values[index]
            if value.device != device:
                with tf.device(device):
                    value = tf.identity(value)
            on_devices.append(value)
        return self._pack(on_devices)

    def unpack(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Return the distinct shards of a DTensor, in the order of `distinct`."""
        device_shards = dtensor.unpack(value)
        return [device_shards[first] for first in self._first_indices]


def get_device_bounds(
    shape: Sequence[int], specs: Sequence[str | None], device_ids: Iterable[int]
) -> list[_Bounds]:
    """Return the bounds of a tensor's shard on each given device of the mesh.

    Args:
        shape: Full shape.
        specs: Sequence with the mesh axis that shards each dimension, or `None`.
        device_ids: Iterable of global device indices.
    """
    mesh = job.mesh()
    bounds = []
    for device in device_ids:
        coordinates = dict(zip(mesh.dim_names, np.unravel_index(device, mesh.shape())))
        sizes = [size // axis_size(spec) for size, spec in zip(shape, specs)]
        starts = [size * int(coordinates.get(spec, 0)) for size, spec in zip(sizes, specs)]
        bounds.append(_Bounds((start, start + size) for start, size in zip(starts, sizes)))
    return bounds


def unshard(variables: list, shards: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return the full values of variables from the ranks' shards, with one collective.

    Args:
        variables: List of `MeshVariable` objects.
        shards: List with a tensor for each variable: this rank's shards, flattened and
            concatenated. All have the same dtype.
        name: Name of the collective, identical on every rank of the mesh.

    Returns:
        A list of tensors in the variables' shapes.
    """
    group = job.model_parallel_group()
    sharded = [i for i, variable in enumerate(variables) if any(variable.specs)]
    rank_shards = [[shard] for shard in shards]  # Lists of the flattened shards of all ranks.
    if group.size > 1 and sharded:
        packed = transport.all_gather(tf.concat([shards[i] for i in sharded], 0), group, name)
        parts = tf.split(packed, [shards[i].shape[0] for i in sharded], axis=1)
        for i, rows in zip(sharded, parts):
            rank_shards[i] = tf.unstack(rows)
    return [
        _assemble(variable, flat_shards) for variable, flat_shards in zip(variables, rank_shards)
    ]


def _assemble(variable, rank_shards):
    """Return the full value of a variable from the flattened shards of each rank of the mesh."""
    mesh = job.mesh()
    num_local = mesh.num_local_devices()
    blocks = {}
    for rank, flat in enumerate(rank_shards):
        ids = range(rank * num_local, (rank + 1) * num_local)
        if len(rank_shards) == 1:
            ids = mesh.local_device_ids()
        distinct = list(dict.fromkeys(get_device_bounds(variable.shape, variable.specs, ids)))
        shards = tf.split(flat, len(distinct))
        for bounds, shard in zip(distinct, shards):
            blocks[tuple(bounds)] = tf.reshape(shard, [stop - start for start, stop in bounds])
    # Join blocks that only differ in this dimension.
    for axis in reversed(range(len(variable.shape))):
        rows = {}
        for bounds in sorted(blocks):
            rows.setdefault(bounds[:axis], []).append(blocks[bounds])
        blocks = {key: tf.concat(row, axis) for key, row in rows.items()}
    return blocks[()]


def sharding_specs(variable: keras.Variable) -> tuple[str | None, ...]:
    """Return the mesh axis, or `None`, that shards each dimension of any Keras variable."""
    if isinstance(variable, MeshVariable):
        return variable.specs
    return (None,) * len(variable.shape)


def get_mesh_fraction(variable: keras.Variable) -> float | None:
    """Return 1 over the number of ranks of the mesh that have the same shards of a variable.

    The result is `None` if every rank has the full variable.
    """
    specs = sharding_specs(variable)
    if not any(specs):
        return None
    num_shards = math.prod(axis_size(axis) for axis in specs)
    return num_shards / (job.model_parallel_group().size * len(variable.shards))


def packed(variable: keras.Variable) -> tf.Tensor:
    """Return any Keras variable as a DTensor."""
    if isinstance(variable, MeshVariable):
        return variable.local.pack([shard.value for shard in variable.shards])
    return dtensor.copy_to_mesh(variable.value, make_layout(sharding_specs(variable)))


def unpacked(variable: keras.Variable, value: tf.Tensor) -> list[tf.Tensor]:
    """Return this rank's distinct shards of a DTensor with the layout of `variable`."""
    if isinstance(variable, MeshVariable):
        return variable.local.unpack(value)
    return dtensor.unpack(value)[:1]
