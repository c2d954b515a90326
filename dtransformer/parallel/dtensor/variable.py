"""Variables cut over the island's mesh: each rank keeps its own slices.

A slice is an ordinary Keras variable on one of this rank's devices, which an ordinary
optimizer updates. For a computation on the mesh the slices of a variable are packed
into one DTensor, without a copy.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from tensorflow.experimental import dtensor

from dtransformer.parallel import job
from dtransformer.parallel.dtensor.layouts import axis_size, make_layout, relayout
from dtransformer.parallel.sharded_variable import ShardedVariable


class MeshVariable(ShardedVariable):
    """A Keras variable of which each device of the mesh holds a slice.

    Its shape is that of the whole. Computations on the mesh see it as a DTensor.

    Args:
        initializer: a function of (shape, dtype) that returns the whole value. It runs
            in the host's memory; devices get their slices only.
        specs: tuple with the mesh axis, or None, that cuts each dimension.
        specs_in_use: the same for what computations see of it, by default `specs`; what
            is cut besides is gathered whenever it is read.
        **kwargs: as `keras.Variable` has them.

    Attributes:
        specs, specs_in_use: as given.
        shards: list of the distinct slices that this rank's devices hold, as ordinary
            Keras variables. Of a slice that the mesh repeats on several devices of this
            rank, the first device keeps the variable.
    """

    def __init__(self, initializer, *, specs, specs_in_use=None, **kwargs):
        self.specs, self.specs_in_use = specs, specs_in_use or specs
        super().__init__(initializer, **kwargs)

    def _initialize_with_initializer(self, initializer):
        with tf.device("CPU:0"):
            whole = np.asarray(initializer(self._shape, dtype=self._dtype))
        self._slices = LocalShards(self._shape, self.specs)
        self.shards = []
        for index, device in zip(self._slices.distinct, self._slices.first_devices):
            with tf.device(device):
                self.shards.append(
                    keras.Variable(
                        whole[index.slices],
                        dtype=self._dtype,
                        trainable=self.trainable,
                        name=self.name,
                    )
                )
        self._value = None

    @property
    def places(self):
        return [(tuple(index), None) for index in self._slices.distinct]

    def _read(self):
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is cut over the mesh and can be read there only: call the network "
                "through its Trainer (fit, evaluate, predict), or through generate"
            )
        return self._maybe_autocast(self.packed())

    def _to_use(self, value):
        return value if self.specs == self.specs_in_use else relayout(value, self.specs_in_use)

    @property
    def trained_value(self):
        """The value as it is stored, in a computation on the mesh."""
        return get_stateless_scope().get_current_value(self)

    def packed(self):
        """Return the whole as one DTensor."""
        return self._slices.pack([shard.value for shard in self.shards])

    def unpacked(self, value):
        """Return the slices of a DTensor that is laid out alike, in the order of the shards."""
        return self._slices.unpack(value)

    def _direct_assign(self, value):
        value = np.asarray(value)
        for shard, index in zip(self.shards, self._slices.distinct):
            shard.assign(value[index.slices])

    def numpy(self):
        """Return the whole. All ranks of the island have to call, as each holds a part."""
        if self._gathered is not None:
            return self._gathered
        return gather_whole(self, [shard.numpy() for shard in self.shards])


class _Bounds(tuple):
    """Where a slice lies: a hashable tuple of (start, stop), one a dimension."""

    @property
    def slices(self):
        return tuple(slice(start, stop) for start, stop in self)


class LocalShards:
    """The slices of a DTensor that this rank's devices hold, each once.

    Args:
        shape: shape of the whole.
        specs: tuple with the mesh axis, or None, that cuts each dimension.

    Attributes:
        distinct: list of where they lie, hashable; their `slices` index the whole.
        first_devices: for each the first local device that holds it.
        shapes: their shapes.
    """

    def __init__(self, shape, specs):
        mesh = job.mesh()
        slices = bounds_of(shape, specs, mesh.local_device_ids())
        self._layout = make_layout(specs)
        self.distinct = list(dict.fromkeys(slices))
        self._number_of = [self.distinct.index(index) for index in slices]  # every device's
        self._firsts = [self._number_of.index(number) for number in range(len(self.distinct))]
        self.first_devices = [mesh.local_devices()[first] for first in self._firsts]
        self.shapes = [tuple(stop - start for start, stop in index) for index in self.distinct]

    def pack(self, parts):
        """Return the DTensor whose slices are `parts`, in the order of `distinct`."""
        on_devices = []
        for device, number in zip(job.mesh().local_devices(), self._number_of):
            with tf.device(device):
                on_devices.append(tf.identity(parts[number]))
        return dtensor.pack(on_devices, self._layout)

    def unpack(self, value):
        """Return the slices of a DTensor, in the order of `distinct`."""
        parts = dtensor.unpack(value)
        return [parts[first] for first in self._firsts]


def bounds_of(shape, specs, device_ids):
    """Return what each device of the mesh holds of a whole.

    Args:
        shape: shape of the whole.
        specs: tuple with the mesh axis, or None, that cuts each dimension.
        device_ids: list of global numbers of devices.
    """
    mesh = job.mesh()
    found = []
    for device in device_ids:
        place = dict(zip(mesh.dim_names, np.unravel_index(device, mesh.shape())))
        widths = [size // axis_size(spec) for size, spec in zip(shape, specs)]
        starts = [width * int(place.get(spec, 0)) for width, spec in zip(widths, specs)]
        found.append(_Bounds((start, start + width) for start, width in zip(starts, widths)))
    return found


def gather_whole(variable, shards):
    """Put a whole together from what each rank of the island holds of it.

    Args:
        variable: a `MeshVariable`.
        shards: list of arrays of the shapes of its shards, on every rank of the island.

    Returns:
        A NumPy array of the variable's shape.
    """
    island, mesh = job.model_parallel_group(), job.mesh()
    parts = np.stack(shards)[None]  # [ranks, shards, ...]
    if island.size > 1 and any(variable.specs):
        parts = (
            job.horovod()
            .allgather(parts, name=f"gather.{variable.path}", process_set=island.process_set)
            .numpy()
        )
    whole = np.empty(variable.shape, parts.dtype)
    num_local = mesh.num_local_devices()
    for number, values in enumerate(parts):
        ids = range(number * num_local, (number + 1) * num_local)
        if len(parts) == 1:
            ids = mesh.local_device_ids()
        for index, value in zip(
            dict.fromkeys(bounds_of(variable.shape, variable.specs, ids)), values
        ):
            whole[index.slices] = value
    return whole


def specs_of(variable):
    """Return the mesh axis, or None, that cuts each dimension of any Keras variable."""
    if isinstance(variable, MeshVariable):
        return variable.specs
    return (None,) * len(variable.shape)


def share_of(variable):
    """Return 1 over the number of the island's ranks that have the same part of a variable.

    None where every rank has the whole.
    """
    specs = specs_of(variable)
    if not any(specs):
        return None
    num_slices = math.prod(axis_size(axis) for axis in specs)
    return num_slices / (job.model_parallel_group().size * len(variable.shards))


def packed(variable):
    """Return any Keras variable as a DTensor."""
    if isinstance(variable, MeshVariable):
        return variable.packed()
    return dtensor.copy_to_mesh(variable.value, make_layout(specs_of(variable)))


def unpacked(variable, value):
    """Return this rank's distinct slices of a DTensor that is laid out as `variable`."""
    if isinstance(variable, MeshVariable):
        return variable.unpacked(value)
    return dtensor.unpack(value)[:1]
