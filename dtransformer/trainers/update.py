"""The update plane: what happens once a step on the slices that this rank holds.

It knows nothing of layers. Gradients come in as sums over this rank's share of the
batch, already divided by what the whole batch counts, so that their sum over the
data group is the gradient of the global mean.
"""

import keras
import tensorflow as tf

from dtransformer.parallel import runtime


def fusion_groups(group_ids, num_groups):
    """Divide gradients into the groups that are reduced together.

    Args:
        group_ids: for each gradient the group that its block asks for, or None.
        num_groups: number of groups for the gradients that no block speaks for.

    Returns:
        A list of lists of positions, each in rising order. Gradients with the same
        id share a group; the others are spread evenly over `num_groups` groups if
        no block speaks at all, and share one group otherwise.

    Example:

    >>> fusion_groups([None, 1, 1, 2, None], num_groups=4)
    [[0, 4], [1, 2], [3]]
    >>> fusion_groups([None] * 5, num_groups=2)
    [[0, 1, 2], [3, 4]]
    """
    if all(group is None for group in group_ids):
        size = max(-(-len(group_ids) // num_groups), 1)
        return [
            list(range(start, min(start + size, len(group_ids))))
            for start in range(0, len(group_ids), size)
        ]
    groups = {}
    for position, group in enumerate(group_ids):
        groups.setdefault(group, []).append(position)
    return list(groups.values())


def reduce_sum(scalars, name):
    """Return the sums of scalars over the data group, in one message.

    Args:
        scalars: dict of tensors of one type, all scalars or not.
        name: name of the reduction, the same on every rank.
    """
    group = runtime.data_group()
    if group.size == 1:
        return scalars
    hvd = runtime.horovod()
    sums = hvd.grouped_allreduce(
        list(scalars.values()), op=hvd.Sum, name=name, process_set=group.process_set
    )
    return dict(zip(scalars, sums))


def scale(gradients, factor):
    """Return gradients, tensors or `tf.IndexedSlices`, times a scalar."""
    return [
        tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient * factor
        for gradient in gradients
    ]


def reduce_gradients(gradients, groups):
    """Return the sums of the gradients over the data group, as dense tensors.

    Dense gradients are reduced group by group. The gradient of an embedding, which
    is a set of rows, travels as rows where that is less than the whole table.

    Args:
        gradients: list of tensors and `tf.IndexedSlices`.
        groups: lists of positions, from `fusion_groups`.

    Returns:
        A list of tensors.
    """
    data_group = runtime.data_group()
    if data_group.size == 1:
        return [tf.convert_to_tensor(gradient) for gradient in gradients]
    hvd = runtime.horovod()
    reduced = list(gradients)
    for number, group in enumerate(groups):
        dense = [i for i in group if not isinstance(gradients[i], tf.IndexedSlices)]
        if dense:
            sums = hvd.grouped_allreduce(
                [gradients[i] for i in dense],
                op=hvd.Sum,
                name=f"gradients_{number}",
                process_set=data_group.process_set,
            )
            for i, total in zip(dense, sums):
                reduced[i] = total
        for i in set(group) - set(dense):
            reduced[i] = _reduce_rows(hvd, data_group, gradients[i], f"rows_{i}")
    return reduced


def _reduce_rows(hvd, group, rows, name):
    """Reduce a gradient of rows, in the form that sends less."""
    ranks = {"process_set": group.process_set}
    num_rows = tf.shape(rows.indices, out_type="int64")[0]
    most_rows = hvd.allreduce(num_rows, op=hvd.Max, name=f"{name}_count", **ranks)
    # A ring all-reduce sends the table twice, an all-gather each rank's rows once.
    gathered_is_less = most_rows * group.size < 2 * tf.cast(rows.dense_shape[0], "int64")

    def gather():
        values = hvd.allgather(rows.values, name=f"{name}_values", **ranks)
        indices = hvd.allgather(rows.indices, name=f"{name}_indices", **ranks)
        return tf.math.unsorted_segment_sum(values, indices, rows.dense_shape[0])

    def reduce():
        table = tf.math.unsorted_segment_sum(rows.values, rows.indices, rows.dense_shape[0])
        return hvd.allreduce(table, op=hvd.Sum, name=f"{name}_table", **ranks)

    total = tf.cond(gathered_is_less, gather, reduce)
    total.set_shape([None, *rows.values.shape[1:]])
    return total


def square_norms(gradients, is_cut=()):
    """Return the square of each gradient's Euclidean norm, that of the whole weight's.

    Args:
        gradients: list of tensors.
        is_cut: for each gradient whether it is a slice, of which the other ranks of the
            island hold the rest; False where it is not given.

    Returns:
        A list of float32 scalars.
    """
    squares = [2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32")) for gradient in gradients]
    island, cut = runtime.island(), [i for i, part in enumerate(is_cut) if part]
    if island.size > 1 and cut:
        hvd = runtime.horovod()
        sums = hvd.allreduce(
            tf.stack([squares[i] for i in cut]),
            op=hvd.Sum,
            name="square_norms",
            process_set=island.process_set,
        )
        for i, total in zip(cut, tf.unstack(sums, num=len(cut))):
            squares[i] = total
    return squares


def clip_as_whole(optimizer, gradients, squares, owners):
    """Clip slices of gradients as an optimizer asks, by the norms of the whole.

    Args:
        optimizer: a Keras optimizer; `leave_clipping` lets it clip no more.
        gradients: list of tensors, scaled as the optimizer scales the loss.
        squares: of each gradient, from `square_norms`.
        owners: for each gradient the number of the weight that it belongs to.

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
    numbers = owners if optimizer.clipnorm else [0] * len(owners)
    norms = tf.sqrt(tf.math.unsorted_segment_sum(squares, numbers, max(numbers) + 1))
    factors = tf.unstack(limit / tf.maximum(norms, limit), num=max(numbers) + 1)
    return [
        gradient * tf.cast(factors[number], gradient.dtype)
        for gradient, number in zip(gradients, numbers)
    ]


def leave_clipping(optimizer):
    """Let a Keras optimizer clip no gradients, which are slices: `clip_as_whole` did.

    Raises:
        ValueError: the optimizer is to clip sums of several steps' gradients.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    clips = optimizer.clipvalue or optimizer.clipnorm or optimizer.global_clipnorm
    if clips and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"{type(optimizer).__name__} is to accumulate gradients "
            f"(gradient_accumulation_steps={optimizer.gradient_accumulation_steps}) and to clip "
            "them, which does not work where operations are cut over a mesh: leave one of the two"
        )
    optimizer._clip_gradients = lambda gradients: gradients


def compiled(optimizer, shards):
    """Return an optimizer's update of weights, compiled with XLA.

    A function of XLA's runs on one device, so there is one for each.

    Args:
        optimizer: a Keras optimizer, built.
        shards: list of Keras variables, on one or several devices.

    Returns:
        A function of the list of their gradients.
    """
    on_device = {}
    for number, shard in enumerate(shards):
        on_device.setdefault(shard.value.device, []).append(number)
    if len(on_device) == 1:
        return tf.function(lambda gradients: optimizer.apply(gradients, shards), jit_compile=True)
    if not _updates_shards_alone(optimizer):
        return lambda gradients: optimizer.apply(gradients, shards)
    scalars = [optimizer.iterations, optimizer._learning_rate]
    scalars = [scalar for scalar in scalars if isinstance(scalar, keras.Variable)]

    def part(numbers):
        def update(gradients, values):
            # The scalars lie on one device; each counts the step for itself.
            with keras.StatelessScope(list(zip(scalars, values))):
                optimizer.apply(gradients, [shards[number] for number in numbers])

        return tf.function(update, jit_compile=True)

    parts = {device: part(numbers) for device, numbers in on_device.items()}

    def update(gradients):
        values = [tf.identity(scalar.value) for scalar in scalars]
        for device, numbers in on_device.items():
            with tf.device(device):
                parts[device]([gradients[number] for number in numbers], values)
        optimizer.iterations.assign_add(1)

    return update


def _updates_shards_alone(optimizer):
    """Return whether all that an update changes belongs to one weight, but for the step."""
    scalars = [variable for variable in optimizer.variables if variable.shape == ()]
    known = [optimizer.iterations, getattr(optimizer, "_learning_rate", None)]
    others = [s for s in scalars if not any(s is k for k in known)]
    return not others and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


# What Keras' optimizers compute from all entries of a weight together.
_NOT_ELEMENTWISE = ("Adafactor", "Lamb", "Muon")


def check_elementwise(optimizer):
    """Check that an optimizer can update the slices of a weight one by one.

    Raises:
        ValueError: names the optimizer, and others that can.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{type(optimizer).__name__} computes with whole weights, and model_parallel cuts "
                "them: use an optimizer that updates each entry by itself, such as AdamW, Adam, "
                "Lion, SGD, RMSprop or Nadam"
            )
