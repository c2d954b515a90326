"""Look-ups in tables and sequences that may be sharded, and tied logits.

Each device looks up its rows of an embedding table, and an all-reduce adds the rows of other
devices ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053), section 3). The gradient of a row
stays on its device. A sharded vocabulary is padded to a multiple of the number of shards.
"""

import keras
import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import (
    Specs,
    activation_specs,
    axis_size,
    constrain,
    constrain_both,
    mesh_axis,
    relayout,
)
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.linear import (
    all_gather_length,
    column_parallel,
    get_length_axis,
    matmul,
    sum_partial,
)
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.zero.units import run_product


def padded_vocab_size(vocab_size: int) -> int:
    """Return the padded vocabulary size V', the next multiple of `model_parallel`.

    Example:

    >>> padded_vocab_size(10)
    10
    """
    model_parallel = get_parallel_config().model_parallel
    return -(-vocab_size // model_parallel) * model_parallel


def mask_padding(logits: tf.Tensor, vocab_size: int) -> tf.Tensor:
    """Set padded logits to the lowest number of their type, so their probability is 0.

    Args:
        logits: Tensor of shape `[..., V']`.
        vocab_size: Integer V ≤ V', the size without padding.

    Returns:
        A tensor of shape `[..., V']`.
    """
    width = logits.shape[-1]
    if width == vocab_size:
        return logits
    is_entry = tf.range(width) < vocab_size
    return tf.where(is_entry, logits, tf.constant(logits.dtype.min, logits.dtype))


def look_up_in_shards(shards: tf.Tensor, ids: tf.Tensor, shard_dim: int, specs: Specs) -> tf.Tensor:
    """Look ids up in every shard of a vocabulary. Ids of other shards return zeros.

    The sum over the shards contains all rows
    ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053), section 3). On CPUs an id outside of
    all shards raises an error, as in `tf.gather`.

    Args:
        shards: Tensor on the mesh: a table `[t, V/t, h]` with `shard_dim=0`, or values
            `[..., t, V/t]` for each id with `shard_dim=-2`.
        ids: Integer tensor of shape `[...]`.
        shard_dim: Integer. Dimension of the shards, one shard per device.
        specs: Mesh axis, or `None`, of each dimension of `[t, ...]` or `[..., t]`, the ids of each
            shard.

    Returns:
        A tensor of shape `[t, ..., h]` or `[..., t]`.
    """
    dim = shard_dim % len(shards.shape)
    num_shards = shards.shape[dim]
    shard_size = shards.shape[dim + 1]
    ones_shape = [num_shards if d == dim else 1 for d in range(len(specs))]
    ids = tf.cast(ids, INDEX_TYPE)
    starts = tf.reshape(shard_size * tf.range(num_shards, dtype=INDEX_TYPE), ones_shape)
    starts = relayout(starts, [spec if d == dim else None for d, spec in enumerate(specs)])
    # The index of an id in its shard, and whether the shard has it.
    local = tf.reshape(ids, [*ids.shape[:dim], 1, *ids.shape[dim:]]) - starts
    local = relayout(local, specs)
    zero = tf.zeros([], INDEX_TYPE)
    is_here = (local >= 0) & (local < shard_size)
    is_elsewhere = (local >= -starts) & (local < num_shards * shard_size - starts)
    indices = tf.where(is_here, local, tf.where(is_elsewhere, zero, zero - 1))
    values = tf.gather(shards, indices, axis=dim + 1, batch_dims=dim + 1)
    if len(values.shape) > len(is_here.shape):
        is_here = is_here[..., None]
    return tf.where(is_here, values, tf.zeros([], values.dtype))


def look_up(
    table: tf.Tensor | keras.Variable, ids: tf.Tensor, rows: str = "vocab_rows"
) -> tf.Tensor:
    """Return rows of a table: `tf.gather` that also works on sharded tables.

    Args:
        table: Tensor or variable of shape `[V, h]`.
        ids: Integer tensor of shape `[b, s]`.
        rows: Logical axis of the table's rows. Defaults to `"vocab_rows"`.

    Returns:
        A tensor of shape `[b, s, h]`, sharded along s with sequence parallelism.
    """
    if not trace.is_on_mesh():
        return tf.gather(table, ids)
    ids = tf.cast(ids, INDEX_TYPE)
    axis = mesh_axis(rows)
    return _look_up_replicated(table, ids) if axis is None else _look_up_sharded(table, ids, axis)


def tied_logits(x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Multiply x by the transposed table of an embedding.

    Args:
        x: Tensor of shape `[b, s, h]`.
        table: Tensor of shape `[V, h]`.

    Returns:
        A tensor of shape `[b, s, V]`, sharded along V on the mesh.
    """
    if not trace.is_on_mesh():
        return matmul(x, table, transpose_kernel=True)

    def multiply(x, table):
        (logits,) = column_parallel(x, [tied_kernel(table)], ("vocab",))
        return logits

    return run_product(multiply, x, table)


def tied_kernel(table: tf.Tensor) -> tf.Tensor:
    """Return the transposed table of an embedding on the mesh, sharded along V.

    Args:
        table: Tensor of shape `[V, h]`.
    """
    # Shard a replicated table first. DTensor cannot shard and transpose it in one operation.
    return tf.transpose(constrain(table, ("vocab", "embed")))


def gather_positions(inputs: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the vectors at some positions of each sequence.

    Off the mesh this is `tf.gather`. On a mesh it is a product with one-hot rows: if the sequence
    is sharded, every device multiplies its shard, and the results are summed.

    Args:
        inputs: Tensor of shape `[b, s, h]`.
        positions: Integer tensor of shape `[b, P]` with values in [0, s). Positions count from the
            start of the full sequence and may repeat.

    Returns:
        A tensor of shape `[b, P, h]`.

    Example:

    >>> gather_positions(tf.reshape(tf.range(6.0), (1, 3, 2)), tf.constant([[2, 0]])).numpy().tolist()
    [[[4.0, 5.0], [0.0, 1.0]]]
    """
    if not trace.is_on_mesh():
        return tf.gather(inputs, positions, batch_dims=1)
    # DTensor cannot shard the result of `tf.one_hot` for 64-bit indices.
    indices = tf.range(inputs.shape[1], dtype=INDEX_TYPE)
    is_position = tf.cast(positions, INDEX_TYPE)[..., None] == indices
    one_hot = constrain(tf.cast(is_position, inputs.dtype), ("batch", None, "length"))
    inputs = constrain_both(inputs, ("batch", "length", None))
    # [b, P, s], [b, s, h] -> [b, P, h]
    return constrain_both(tf.matmul(one_hot, inputs), ("batch", None, None))


def _look_up_replicated(table, ids):
    ids = constrain(ids, ("batch", "length"))

    @custom_gradient
    def gather(table):
        def gradient(dy):
            # Exchange rows instead of full tables.
            dy = relayout(dy, (None,) * 3)
            all_ids = relayout(ids, (None, None))
            # [b, s, h] -> [b·s, h] -> [V, h]
            rows = tf.reshape(dy, [-1, table.shape[-1]])
            row_ids = tf.reshape(all_ids, [-1])
            return relayout(
                tf.math.unsorted_segment_sum(rows, row_ids, table.shape[0]), (None, None)
            )

        return constrain(tf.gather(table, ids), ("batch", "length", None)), gradient

    return gather(table)


def _look_up_sharded(table, ids, axis):
    num_shards = axis_size(axis)
    (num_rows, features) = table.shape
    shard_rows = num_rows // num_shards
    ids = constrain(ids, ("batch", "inner_length"))
    batch, inner = activation_specs(("batch", "inner_length"), ids.shape)
    length_axis = get_length_axis(ids.shape)

    @custom_gradient
    def gather(table):
        # [V, h] -> [t, V/t, h] -> [t, b, s, h]
        shards = tf.reshape(table, [num_shards, shard_rows, features])
        shards = relayout(shards, (axis, None, None))
        rows = look_up_in_shards(shards, ids, 0, (axis, batch, inner))

        def gradient(dy):
            dy = relayout(dy, (None, length_axis, None))  # Exchange rows instead of full tables.
            all_ids = tf.reshape(relayout(ids, (None, None)), [-1])
            # [b, s, h] -> [t or 1, b·s, h] -> [b·s, t or 1, h]
            if length_axis:
                dy = all_gather_length(dy, axis, length_axis)
            dy = tf.reshape(dy, [-1, all_ids.shape[0], features])
            dy = tf.transpose(dy, [1, 0, 2])
            shard_ids = tf.range(num_shards, dtype=INDEX_TYPE)
            owner = all_ids[:, None] // shard_rows == shard_ids[None, :]
            owner = relayout(tf.cast(owner, dy.dtype), (None, axis))
            dy = relayout(dy * owner[:, :, None], (None, axis, None))
            # The index of a row in its shard does not depend on the shard; other devices add zeros.
            row_sums = tf.math.unsorted_segment_sum(dy, all_ids % shard_rows, shard_rows)
            row_sums = tf.transpose(relayout(row_sums, (None, axis, None)), [1, 0, 2])
            row_sums = tf.reshape(relayout(row_sums, (axis, None, None)), [num_rows, features])
            return relayout(row_sums, (axis, None))

        return sum_partial(rows, axis, length_axis), gradient

    return gather(table)
