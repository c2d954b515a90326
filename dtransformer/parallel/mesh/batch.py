"""Transfer of batches and numbers to the mesh, and of results back."""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer.parallel.mesh.axis_rules import axis_size, make_layout, mesh_axis
from dtransformer.parallel.mesh.variable import get_device_bounds
from dtransformer.parallel.runtime import job


def put_sharded(batch):
    """Put a batch on the mesh and shard its rows over the data axis.

    Args:
        batch: Nested tensors `[b, ...]`, identical on every rank of the mesh.

    Returns:
        Nested DTensors `[b', ...]`, with `rows_added(b)` rows of zeros appended.
    """
    axis = mesh_axis("batch")

    def put(x):
        if x is None:
            return None
        pad = tf.pad
        # Results that are on another device are not copied to the host.
        if not tf.is_tensor(x) or x.device.endswith("CPU:0"):
            pad = np.pad
            x = np.asarray(x)
        x = pad(x, [(0, rows_added(len(x))), *[(0, 0)] * (x.ndim - 1)])
        specs = (axis, *[None] * (x.ndim - 1))
        device_bounds = get_device_bounds(x.shape, specs, job.mesh().local_device_ids())
        return _pack([x[bounds.slices] for bounds in device_bounds], specs)

    return tf.nest.map_structure(put, batch)


def put_batch(inputs, labels, sample_weight: tf.Tensor | None) -> tuple:
    """Put a batch on the mesh. Added rows get sample weights of 0.

    Args:
        inputs: Nested tensors `[b, ...]`.
        labels: Nested tensors `[b, ...]`.
        sample_weight: Tensor `[b]` or `[b, t]`, or `None`.

    Returns:
        An `(inputs, labels, sample_weight)` tuple of nested DTensors.
    """
    rows = num_rows((inputs, labels))
    if rows_added(rows):
        ones = np.ones([rows], "float32")
        sample_weight = tf.nest.map_structure(lambda x: ones if x is None else x, sample_weight)
    return put_sharded((inputs, labels, sample_weight))


def rows_added(num_rows: int) -> int:
    """Return the number of zero rows to append so that every device gets the same number of rows.

    An empty batch gets one row per shard, because every device needs a row.
    """
    axis = axis_size(mesh_axis("batch"))
    return -num_rows % axis if num_rows else axis


def num_rows(batch) -> int:
    """Return the number b of rows of nested tensors `[b, ...]`.

    Raises:
        ValueError: If the tensors have different numbers of rows, or if one is ragged or sparse.
    """
    flat = [x for x in tf.nest.flatten(batch) if x is not None]
    for x in flat:
        if not hasattr(x, "__len__"):
            raise ValueError(
                f"A mesh or a pipeline needs dense tensors, but the batch has a {type(x).__name__}. "
                "Convert it in the dataset, for example with "
                "`.map(lambda x, y: (x.to_tensor(), y))`."
            )
    counts = {len(x) for x in flat}
    if len(counts) != 1:
        raise ValueError(
            f"The tensors of a batch must have the same number of rows, got {sorted(counts)}."
        )
    return counts.pop()


def put_scalars(numbers) -> tf.Tensor:
    """Put numbers that change between steps on the mesh, replicated and flattened.

    DTensor treats tensors of fewer than 256 elements as constants and compiles the function again
    when they change, so the result is padded. The numbers are copied between devices and the host
    reads none.
    """
    return put_replicated(_padded(tf.reshape(numbers, [-1])))


def _padded(numbers):
    """Append zeros to a vector of fewer than 256 elements."""
    return tf.pad(numbers, [[0, max(0, 256 - numbers.shape[0])]])


def put_seed(seed: tf.Tensor) -> tf.Tensor:
    """Put a dropout seed `[3]` on the mesh, followed by each device's coordinate on the data axis.

    The layout of the result is replicated although the coordinate differs between devices, so that
    each device can draw the random numbers of its rows. See `random_numbers.py`.

    Returns:
        A DTensor, padded like the result of `put_scalars`. The first four elements are the seed.
    """
    axis = mesh_axis("batch")
    locations = job.mesh().local_device_locations()
    coordinates = [0 if axis is None else location[axis] for location in locations]
    shards = [_padded(tf.concat([seed, tf.constant([x], seed.dtype)], 0)) for x in coordinates]
    return _pack(shards, (None,))


def put_replicated(value) -> tf.Tensor:
    """Put a copy of a tensor on every device of the mesh."""
    value = tf.convert_to_tensor(value)
    return _pack([value] * job.mesh().num_local_devices(), (None,) * value.shape.rank)


def _pack(shards, specs):
    """Return a DTensor made of one array or tensor per local device."""
    tensors = []
    for device, shard in zip(job.mesh().local_devices(), shards):
        with tf.device(device):
            tensors.append(tf.identity(shard))
    return dtensor.pack(tensors, make_layout(specs))


def local_value(value: tf.Tensor) -> tf.Tensor:
    """Return the local tensor of a replicated DTensor."""
    return dtensor.unpack(value)[0]
