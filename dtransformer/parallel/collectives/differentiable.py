"""The public collectives of whole groups; the package's docstring says what callers keep to.

Each says what is sent, a function of `transport`, and what its gradient is, another
collective. A new one needs such a function here, or in a file of its own, and its name in the
package's `__all__`.
"""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.call import Call
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# AutoGraph would translate these functions for every `tf.function`, to no purpose.
as_it_is = tf.autograph.experimental.do_not_convert


@as_it_is
def broadcast(x: tf.Tensor, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the root's tensor on every rank.

    Args:
        x: a tensor of any shape. The other ranks' have the root's shape and dtype, and
            their values are not read.
        root: position of the rank whose tensor it is.
        group: a `Group`.
    """
    call = Call("broadcast", x, group, root=root)
    return call.run(
        lambda x: call.carry(transport.broadcast, x, root),
        lambda g, _: reduce_sum(g, root, call.group),
    )


@as_it_is
def reduce_sum(x: tf.Tensor, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the sum over the group on the root, zeros of the same shape elsewhere."""
    call = Call("reduce_sum", x, group, adds=True, root=root)
    return call.run(
        lambda x: call.at(root, call.carry(transport.all_reduce, x, "Sum"), tf.zeros_like),
        lambda g, _: broadcast(g, root, call.group),
    )


@as_it_is
def all_reduce_sum(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the sum over the group on every rank."""
    call = Call("all_reduce_sum", x, group, adds=True)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, "Sum"),
        lambda g, _: all_reduce_sum(g, call.group),
    )


@as_it_is
def all_reduce_max(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the elementwise maximum over the group on every rank.

    The gradient goes to every rank that holds the maximum, in full to each of a tie.
    """
    return _all_reduce_extreme("all_reduce_max", "Max", x, group)


@as_it_is
def all_reduce_min(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the elementwise minimum over the group; gradients as for the maximum."""
    return _all_reduce_extreme("all_reduce_min", "Min", x, group)


def _all_reduce_extreme(function, op, x, group):
    call = Call(function, x, group)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, op),
        lambda g, y: tf.where(call.x == y, all_reduce_sum(g, call.group), tf.zeros_like(g)),
    )


@as_it_is
def gather(x: tf.Tensor, axis: int = 0, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the ranks' tensors, concatenated along an axis, on the root.

    Args:
        x: a tensor [..., d, ...].
        axis: the axis of d; a negative one counts from the end.
        root: position of the rank that gets the result.
        group: a `Group` of n ranks.

    Returns:
        A tensor [..., n · d, ...] on the root, [..., 0, ...] elsewhere.
    """
    call = Call("gather", x, group, axis=axis, root=root)
    return call.run(
        lambda x: _join(call.carry(transport.gather, x, root), axis),
        lambda g, _: scatter(
            call.at(
                root,
                g,
                lambda g: _pad(g, axis, call.group.size * static_or_dynamic_shape(call.x)[axis]),
            ),
            axis,
            root,
            call.group,
        ),
    )


@as_it_is
def all_gather(x: tf.Tensor, axis: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the ranks' tensors [..., d, ...], concatenated to [..., n · d, ...]."""
    call = Call("all_gather", x, group, axis=axis)
    return call.run(
        lambda x: _join(call.carry(transport.all_gather, x), axis),
        lambda g, _: reduce_scatter_sum(g, axis, call.group),
    )


@as_it_is
def scatter(x: tf.Tensor, axis: int = 0, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return this rank's shard of the root's tensor.

    Args:
        x: a tensor [..., n · d, ...]. The other ranks' have the root's shape and
            dtype, and their values are not read.
        axis: the axis that is sharded; a negative one counts from the end.
        root: position of the rank whose tensor it is.
        group: a `Group` of n ranks.

    Returns:
        A tensor [..., d, ...].
    """
    call = Call("scatter", x, group, divides="axis", axis=axis, root=root)
    return call.run(
        lambda x: call.carry(transport.scatter, _split(x, axis, call.group.size), root),
        lambda g, _: call.at(
            root,
            gather(g, axis, root, call.group),
            lambda nothing: _pad(nothing, axis, static_or_dynamic_shape(call.x)[axis]),
        ),
    )


@as_it_is
def reduce_scatter_sum(x: tf.Tensor, axis: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return this rank's shard [..., d, ...] of the sum of tensors [..., n · d, ...]."""
    call = Call("reduce_scatter_sum", x, group, adds=True, divides="axis", axis=axis)
    return call.run(
        lambda x: call.carry(transport.reduce_scatter, _split(x, axis, call.group.size)),
        lambda g, _: all_gather(g, axis, call.group),
    )


@as_it_is
def all_to_all(
    x: tf.Tensor, split_axis: int = 0, concat_axis: int = 0, group: Group | None = None
) -> tf.Tensor:
    """Send shard j to rank j, and return the shards received, concatenated.

    Args:
        x: a tensor. The group's size n divides its dimension `split_axis`.
        split_axis: the axis that is sharded: its dimension is divided by n.
        concat_axis: the axis of concatenation: its dimension is multiplied by n.
        group: a `Group`.
    """
    axes = {"split_axis": split_axis, "concat_axis": concat_axis}
    call = Call("all_to_all", x, group, divides="split_axis", **axes)

    def forward(x):
        rows = call.carry(transport.all_to_all, _split(x, split_axis, call.group.size))
        return _join(rows, concat_axis)

    return call.run(forward, lambda g, _: all_to_all(g, concat_axis, split_axis, call.group))


def _move(x, source, destination):
    order = list(range(x.shape.rank))
    order.insert(destination, order.pop(source))
    return tf.transpose(x, order)


def _split(x, axis, count):
    """[..., n · d, ...] -> [n, ..., d, ...]"""
    axis, shape = axis % x.shape.rank, static_or_dynamic_shape(x)
    split = [*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]]
    return _move(tf.reshape(x, split), axis, 0)


def _join(rows, axis):
    """[n, ..., d, ...] -> [..., n · d, ...]"""
    axis, shape = axis % (rows.shape.rank - 1), static_or_dynamic_shape(rows)
    joined = [*shape[1 : axis + 1], shape[0] * shape[axis + 1], *shape[axis + 2 :]]
    return tf.reshape(_move(rows, 0, axis), joined)


def _pad(nothing, axis, size):
    """[..., 0, ...] -> zeros [..., size, ...], on the tape where `nothing` is."""
    axis = axis % nothing.shape.rank
    return tf.pad(nothing, [[0, size * (i == axis)] for i in range(nothing.shape.rank)])
