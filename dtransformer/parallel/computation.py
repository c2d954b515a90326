"""Functions on the island's mesh: values are put there, computed with, and taken back."""

import zlib

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer.parallel import audit, layout, runtime, variables


class MeshFunction:
    """A function of a network's variables, compiled to run on the mesh.

    Args:
        function: a function of nested DTensors that returns nested DTensors. Inside of
            it the variables' values are DTensors.
        network_variables: list of the Keras variables that it reads. What it assigns
            to them is written back afterwards.
        gradients: whether it computes gradients.

    Call arguments:
        *args: nested DTensors, from `put_rows` and `put_whole`.
    """

    def __init__(self, function, network_variables, gradients=False):
        self._function, self._gradients = function, gradients
        self._variables = network_variables
        self._traced = tf.function(self._trace, autograph=False)
        # Each shape of a batch is compiled: DTensor has to know it.
        self._traced._omit_frequent_tracing_warning = True
        self._is_new = False
        self.compiled = []  # names of functions, of the last compilation

    def _trace(self, weights, args):
        self._is_new = True
        mapping = list(zip(self._variables, weights))
        with keras.StatelessScope(state_mapping=mapping) as scope, layout.on_mesh(self._gradients):
            results = self._function(*args)
        updates = {}
        for number, variable in enumerate(self._variables):
            new = scope.get_current_value(variable)
            if new is not None and new is not weights[number]:
                updates[str(number)] = layout.pin(new, variables.specs_of(variable))
        return results, updates

    def __call__(self, *args):
        """Return what the function returns; every device is done with it."""
        return self.run(self.packed(), *args)

    def packed(self):
        """Return the variables as DTensors."""
        return [variables.packed(variable) for variable in self._variables]

    def run(self, weights, *args):
        """As a call, with the variables that `packed` has returned."""
        results, updates = self._traced(weights, args)
        del weights  # or an update in place would have to copy them
        wait(results)
        if self._is_new:
            self.compiled, self._is_new = audit.new_functions(), False
        for number, value in updates.items():
            variable = self._variables[int(number)]
            shards = variables.own_shards([variable])
            for shard, part in zip(shards, variables.unpacked(variable, value)):
                shard.assign(part)
        return results


def wait(results):
    """Wait until every local device has computed nested DTensors.

    DTensor runs asynchronously; an update of the weights before it is done would change
    what it still reads. All results of a function come at once.
    """
    first = next(result for result in tf.nest.flatten(results) if result is not None)
    for part in dtensor.unpack(first):
        part.numpy()


def put_rows(batch):
    """Put a batch on the mesh, its rows cut over the mesh's data axis.

    Args:
        batch: nested tensors [b, ...], the same on every rank of the island.

    Returns:
        Nested DTensors [b', ...]: rows of zeros follow where the data axis does not
        divide b.
    """
    axis = layout.mesh_axis("batch")

    def put(x):
        if x is None:
            return None
        x = np.asarray(x)
        x = np.pad(x, [(0, -len(x) % layout.axis_size(axis)), *[(0, 0)] * (x.ndim - 1)])
        specs = (axis, *[None] * (x.ndim - 1))
        slices = variables.slices_of(x.shape, specs, layout.get_mesh().local_device_ids())
        return _pack([x[part.slices] for part in slices], specs)

    return tf.nest.map_structure(put, batch)


def put_batch(inputs, labels, sample_weight):
    """Put a batch on the mesh; sample weights tell of rows that are added that they are none.

    Args:
        inputs, labels: nested tensors [b, ...].
        sample_weight: tensor [b] or [b, t], or None.
    """
    number = num_rows((inputs, labels))
    if sample_weight is None and number % layout.axis_size(layout.mesh_axis("batch")):
        sample_weight = np.ones([number], "float32")
    return put_rows((inputs, labels, sample_weight))


def num_rows(batch):
    """Return the number of rows of nested tensors.

    Raises:
        ValueError: they have different numbers of rows.
    """
    numbers = {len(x) for x in tf.nest.flatten(batch) if x is not None}
    if len(numbers) != 1:
        raise ValueError(
            f"the tensors of a batch have different numbers of rows: {sorted(numbers)}"
        )
    return numbers.pop()


def put_numbers(numbers):
    """Put numbers that differ from step to step on the mesh, repeated.

    DTensor takes tensors of less than 256 entries for constants, and compiles the function
    again when they change.
    """
    numbers = np.reshape(numbers, [-1])
    return put_whole(np.resize(numbers, max(256, numbers.size)))


def put_whole(value):
    """Put a tensor on every device of the mesh."""
    value = np.asarray(value)
    return _pack([value] * layout.get_mesh().num_local_devices(), (None,) * value.ndim)


def _pack(parts, specs):
    """Return a DTensor of arrays, one for each local device."""
    tensors = []
    for device, part in zip(layout.get_mesh().local_devices(), parts):
        with tf.device(device):
            tensors.append(tf.constant(part))
    return dtensor.pack(tensors, layout.make_layout(specs))


def whole(value):
    """Return a DTensor that every device holds as a whole, as a tensor of this rank."""
    return dtensor.unpack(value)[0]


def check_island_batch(batch):
    """Compare the batch of the island's ranks: they compute on the same one.

    Raises:
        ValueError: see `check_same_batch`.
    """
    check_same_batch(batch, runtime.island(), "an island")


def check_same_batch(batch, group, name):
    """Compare the nested tensors of a batch of ranks that compute on the same one.

    Args:
        batch: nested tensors; None stays out.
        group: the `Group` of the ranks.
        name: what the ranks are together, for the error.

    Raises:
        ValueError: shapes, types or contents differ; on every rank of the group.
    """
    if group.size == 1:
        return
    arrays = [np.asarray(x) for x in tf.nest.flatten(batch) if x is not None]
    shapes = "; ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    mine = np.array([zlib.crc32(shapes.encode()), checksum], "int64")
    hvd, ranks = runtime.horovod(), {"process_set": group.process_set}
    everyone = hvd.allgather(mine[None], name="same_batch", **ranks)
    if (everyone.numpy() == mine).all():
        return
    texts = hvd.allgather_object(shapes, name="same_batch_shapes", **ranks)
    told = ", ".join(f"rank {rank} has {text}" for rank, text in zip(group.ranks, texts))
    raise ValueError(
        f"the ranks of {name} compute on one batch, and theirs differ: {told}; give them the "
        "same rows in the same order, those of dtransformer.parallel.runtime.data_shard(), and "
        "fit(shuffle=False) where they are arrays"
    )
