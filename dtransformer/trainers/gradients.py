"""Gradients between the ranks: their sums, their norms, and clipping.

Gradients come in as sums over this rank's share of the batch, already divided by what the
whole batch counts, so that their sum over the data group is the gradient of the global
mean.
"""

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards


def reduce_sum(scalars, name):
    """Return the sums of scalars over the data group, in one message.

    Args:
        scalars: dict of tensors of one type, all scalars or not.
        name: name of the reduction, the same on every rank.
    """
    group = job.data_parallel_group()
    if group.size == 1:
        return scalars
    hvd = job.horovod()
    sums = hvd.grouped_allreduce(
        list(scalars.values()), op=hvd.Sum, name=name, process_set=group.process_set
    )
    return dict(zip(scalars, sums))


def cast(gradient, dtype):
    """Return a gradient, a tensor or `tf.IndexedSlices`, in another type."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def check_used(weights, gradients):
    """Check that the loss has a gradient of every weight.

    Raises:
        ValueError: names the weights that the loss does not depend on.
    """
    unused = [w.path for w, gradient in zip(weights, gradients) if gradient is None]
    if unused:
        raise ValueError(f"the loss does not depend on the weights {', '.join(unused)}")


def scale(gradients, factor):
    """Return gradients, tensors or `tf.IndexedSlices`, times a scalar."""
    return [
        tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient * factor
        for gradient in gradients
    ]


def reduce(gradients, buckets, is_sliced, dtype=None):
    """Return the sums of the gradients over the data group, as dense tensors.

    Dense gradients are reduced bucket by bucket. The gradient of an embedding, which
    is a set of rows, travels as rows where that is less than the whole table.

    Args:
        gradients: list of tensors and `tf.IndexedSlices`.
        buckets: lists of positions, from `buckets`.
        is_sliced: for each gradient whether only this rank's slice of the sum is wanted.
        dtype: name of the type in which dense gradients travel, by default their own.

    Returns:
        A list of tensors; slices are flat, as `parallel.slices` cuts them.
    """
    group = job.data_parallel_group()
    if group.size == 1:
        return [tf.convert_to_tensor(gradient) for gradient in gradients]
    reduced = list(gradients)
    for number, positions in enumerate(buckets):
        messages = {}  # of one type each
        for i in positions:
            if isinstance(gradients[i], tf.IndexedSlices):
                reduced[i] = _reduce_rows(group, gradients[i], is_sliced[i], f"rows_{i}")
            else:
                messages.setdefault((is_sliced[i], gradients[i].dtype.name), []).append(i)
        for (sliced, kind), together in messages.items():
            add_up = flat_shards.reduce_scatter if sliced else flat_shards.all_reduce
            name = f"{'slices' if sliced else 'gradients'}_{number}_{kind}"
            sums = add_up([gradients[i] for i in together], group, name, dtype)
            for i, total in zip(together, sums):
                reduced[i] = total
    return reduced


def _reduce_rows(group, rows, sliced, name):
    """Reduce a gradient of rows, in the form that sends less."""
    hvd = job.horovod()
    shape = tf.TensorShape(tf.get_static_value(rows.dense_shape))
    num_rows = tf.shape(rows.indices, out_type="int64")[0]
    most_rows = hvd.allreduce(
        num_rows, op=hvd.Max, name=f"{name}_count", process_set=group.process_set
    )
    # A ring all-reduce sends the table twice, a reduce-scatter once, an all-gather each
    # rank's rows once.
    times = 1 if sliced else 2
    gathered_is_less = most_rows * group.size < times * tf.cast(rows.dense_shape[0], "int64")

    def table(values, indices):
        total = tf.math.unsorted_segment_sum(values, indices, rows.dense_shape[0])
        return tf.ensure_shape(total, shape)

    def gather():
        ranks = {"process_set": group.process_set}
        values = hvd.allgather(rows.values, name=f"{name}_values", **ranks)
        indices = hvd.allgather(rows.indices, name=f"{name}_indices", **ranks)
        total = table(values, indices)
        return flat_shards.own_shard(total, group) if sliced else total

    def add_up():
        total = table(rows.values, rows.indices)
        function = flat_shards.reduce_scatter if sliced else flat_shards.all_reduce
        return function([total], group, f"{name}_table")[0]

    return tf.cond(gathered_is_less, gather, add_up)


def square_norms(gradients, is_sliced=(), shares=()):
    """Return the square of each gradient's Euclidean norm, that of the whole weight's.

    Args:
        gradients: list of tensors.
        is_sliced: for each gradient whether it is a slice over the data group; False
            where it is not given.
        shares: for each gradient 1 over the number of the island's ranks that have the
            same part of it; None, or not given, where every rank has the whole.

    Returns:
        A list of float32 scalars.
    """
    squares = [2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32")) for gradient in gradients]
    sliced = [i for i, part in enumerate(is_sliced) if part]
    _sum_some(squares, sliced, job.data_parallel_group(), "square_norms_of_slices")
    cut = [i for i, share in enumerate(shares) if share is not None]
    for i in cut:
        squares[i] *= shares[i]
    _sum_some(squares, cut, job.model_parallel_group(), "square_norms")
    return squares


def sum_over_stages(scalar):
    """Return the sum of a scalar over the stages of a pipeline."""
    total = [scalar]
    _sum_some(total, [0], job.pipeline_group(), "sum_of_stages")
    return total[0]


def _sum_some(scalars, positions, group, name):
    """Replace some of a list of scalars by their sums over a group, in one message."""
    if group.size == 1 or not positions:
        return
    hvd = job.horovod()
    own = tf.stack([scalars[i] for i in positions])
    sums = hvd.allreduce(own, op=hvd.Sum, name=name, process_set=group.process_set)
    for i, total in zip(positions, tf.unstack(sums, num=len(positions))):
        scalars[i] = total


def clip_as_whole(optimizer, gradients, squares, owners, norm):
    """Clip slices of gradients as an optimizer asks, by the norms of the whole.

    Args:
        optimizer: a Keras optimizer; `leave_clipping` lets it clip no more.
        gradients: list of tensors, scaled as the optimizer scales the loss.
        squares: of each gradient, from `square_norms`.
        owners: for each gradient the number of the weight that it belongs to.
        norm: of all gradients of the network.

    Returns:
        A list of tensors.
    """
    loss_scale = optimizer.scale_loss(1.0)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer.clipvalue:
        bounds = [tf.cast(optimizer.clipvalue * loss_scale, g.dtype) for g in gradients]
        return [tf.clip_by_value(g, -bound, bound) for g, bound in zip(gradients, bounds)]
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit:
        return gradients
    limit *= loss_scale
    if optimizer.clipnorm:
        norms = tf.sqrt(tf.math.unsorted_segment_sum(squares, owners, max(owners) + 1))
        factors = tf.unstack(limit / tf.maximum(norms, limit), num=max(owners) + 1)
    else:
        owners, factors = [0] * len(owners), [limit / tf.maximum(norm, limit)]
    return [
        gradient * tf.cast(factors[number], gradient.dtype)
        for gradient, number in zip(gradients, owners)
    ]
