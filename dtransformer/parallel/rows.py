"""Looking rows up in a table that may be cut by rows over the mesh.

Each device looks up the rows that it holds, zeros stand in for the others, and the sum
over the mesh axis has them all (Shoeybi et al., 2019, arXiv 1909.08053, §3). The
gradient stays on the device that holds the row.
"""

import tensorflow as tf

from dtransformer.parallel import layout
from dtransformer.parallel.layout import constrain, pin
from dtransformer.parallel.products import gather_length, length_axis_of, sum_partial


def look_up(table, ids):
    """Return rows of a table.

    Args:
        table: tensor or variable [V, h].
        ids: int32 tensor [b, s].

    Returns:
        A tensor [b, s, h], cut along s under sequence parallelism.
    """
    if not layout.is_on_mesh():
        return tf.gather(table, ids)
    axis = layout.mesh_axis("vocab_rows")
    return _look_up_whole(table, ids) if axis is None else _look_up_cut(table, ids, axis)


def _look_up_whole(table, ids):
    ids = constrain(ids, ("batch", None))

    @layout.custom_gradient
    def gather(table):
        def gradient(dy):
            # Rows are sent to every device, not whole tables.
            dy, everywhere = pin(dy, (None,) * 3), pin(ids, (None, None))
            rows = tf.reshape(dy, [-1, table.shape[-1]])
            numbers = tf.reshape(everywhere, [-1])
            return pin(tf.math.unsorted_segment_sum(rows, numbers, table.shape[0]), (None, None))

        return constrain(tf.gather(table, ids), ("batch", "length", None)), gradient

    return gather(table)


def _look_up_cut(table, ids, axis):
    num_slices, (num_rows, features) = layout.axis_size(axis), table.shape
    rows_per_slice = num_rows // num_slices
    ids = constrain(ids, ("batch", None))
    batch = layout.activation_specs(("batch",), ids.shape[:1])[0]
    length_axis = length_axis_of(ids.shape)

    @layout.custom_gradient
    def gather(table):
        slices = tf.reshape(table, [num_slices, rows_per_slice, features])
        slices = pin(slices, (axis, None, None))
        # [slices, b, s]: the row's number in the slice, and whether it is there
        starts = tf.reshape(rows_per_slice * tf.range(num_slices), [num_slices, 1, 1])
        numbers = tf.reshape(ids, [1, *ids.shape]) - pin(starts, (axis, None, None))
        numbers = pin(numbers, (axis, batch, None))
        is_here = (numbers >= 0) & (numbers < rows_per_slice)
        rows = tf.gather(slices, tf.where(is_here, numbers, 0), axis=1, batch_dims=1)
        rows = tf.where(is_here[..., None], rows, tf.zeros([], rows.dtype))

        def gradient(dy):
            if batch is not None:  # rows are sent to every device
                dy = pin(dy, (None, length_axis, None))
            everywhere = tf.reshape(pin(ids, (None, None)), [-1])
            # [slices or 1, b·s, h]
            dy = gather_length(dy, axis, length_axis)
            dy = tf.reshape(dy, [-1, everywhere.shape[0], features])
            dy = tf.transpose(dy, [1, 0, 2])
            owner = everywhere[:, None] // rows_per_slice == tf.range(num_slices)[None, :]
            owner = pin(tf.cast(owner, dy.dtype), (None, axis))
            dy = pin(dy * owner[:, :, None], (None, axis, None))
            # A row's number in its slice is the same for all slices: others add zeros to theirs.
            total = tf.math.unsorted_segment_sum(dy, everywhere % rows_per_slice, rows_per_slice)
            total = tf.transpose(pin(total, (None, axis, None)), [1, 0, 2])
            total = tf.reshape(pin(total, (axis, None, None)), [num_rows, features])
            return pin(total, (axis, None))

        return sum_partial(rows, axis, length_axis), gradient

    return gather(table)
