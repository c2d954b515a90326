"""Looking rows up in a table that may be cut by rows over the mesh.

Each device looks up the rows that it holds, zeros stand in for the others, and the sum
over the mesh axis has them all (Shoeybi et al., 2019, arXiv 1909.08053, §3). The
gradient stays on the device that holds the row.
"""

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.axis_rules import activation_specs, constrain, mesh_axis
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.dtensor.layouts import axis_size, relayout
from dtransformer.parallel.tensor_parallel.linear import (
    all_gather_length,
    length_axis_of,
    sum_partial,
)


def look_up(table, ids):
    """Return rows of a table.

    Args:
        table: tensor or variable [V, h].
        ids: int32 tensor [b, s].

    Returns:
        A tensor [b, s, h], cut along s under sequence parallelism.
    """
    if not trace.is_on_mesh():
        return tf.gather(table, ids)
    axis = mesh_axis("vocab_rows")
    return _look_up_replicated(table, ids) if axis is None else _look_up_sharded(table, ids, axis)


def _look_up_replicated(table, ids):
    ids = constrain(ids, ("batch", None))

    @custom_gradient
    def gather(table):
        def gradient(dy):
            # Rows are sent to every device, not whole tables.
            dy, everywhere = relayout(dy, (None,) * 3), relayout(ids, (None, None))
            rows = tf.reshape(dy, [-1, table.shape[-1]])
            numbers = tf.reshape(everywhere, [-1])
            return relayout(
                tf.math.unsorted_segment_sum(rows, numbers, table.shape[0]), (None, None)
            )

        return constrain(tf.gather(table, ids), ("batch", "length", None)), gradient

    return gather(table)


def _look_up_sharded(table, ids, axis):
    num_slices, (num_rows, features) = axis_size(axis), table.shape
    rows_per_slice = num_rows // num_slices
    ids = constrain(ids, ("batch", None))
    batch = activation_specs(("batch",), ids.shape[:1])[0]
    length_axis = length_axis_of(ids.shape)

    @custom_gradient
    def gather(table):
        slices = tf.reshape(table, [num_slices, rows_per_slice, features])
        slices = relayout(slices, (axis, None, None))
        # [slices, b, s]: the row's number in the slice, and whether it is there
        starts = tf.reshape(rows_per_slice * tf.range(num_slices), [num_slices, 1, 1])
        numbers = tf.reshape(ids, [1, *ids.shape]) - relayout(starts, (axis, None, None))
        numbers = relayout(numbers, (axis, batch, None))
        is_here = (numbers >= 0) & (numbers < rows_per_slice)
        rows = tf.gather(slices, tf.where(is_here, numbers, 0), axis=1, batch_dims=1)
        rows = tf.where(is_here[..., None], rows, tf.zeros([], rows.dtype))

        def gradient(dy):
            if batch is not None:  # rows are sent to every device
                dy = relayout(dy, (None, length_axis, None))
            everywhere = tf.reshape(relayout(ids, (None, None)), [-1])
            # [slices or 1, b·s, h]
            dy = all_gather_length(dy, axis, length_axis)
            dy = tf.reshape(dy, [-1, everywhere.shape[0], features])
            dy = tf.transpose(dy, [1, 0, 2])
            owner = everywhere[:, None] // rows_per_slice == tf.range(num_slices)[None, :]
            owner = relayout(tf.cast(owner, dy.dtype), (None, axis))
            dy = relayout(dy * owner[:, :, None], (None, axis, None))
            # A row's number in its slice is the same for all slices: others add zeros to theirs.
            total = tf.math.unsorted_segment_sum(dy, everywhere % rows_per_slice, rows_per_slice)
            total = tf.transpose(relayout(total, (None, axis, None)), [1, 0, 2])
            total = tf.reshape(relayout(total, (axis, None, None)), [num_rows, features])
            return relayout(total, (axis, None))

        return sum_partial(rows, axis, length_axis), gradient

    return gather(table)
