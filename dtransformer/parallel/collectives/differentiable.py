"""The public collectives of whole groups; the package's docstring says what callers keep to.

Each says what is sent, a function of `transport`, and what its gradient is, another
collective. A new one needs such a function here, or in a file of its own, and its name in the
package's `__all__`.
"""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.call import Call, check_member, check_position, describe
from dtransformer.parallel.collectives.transport import tied
from dtransformer.parallel.runtime import job
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

    def gradient(g, _):
        size = call.group.size * static_or_dynamic_shape(call.x)[axis]
        g = call.at(root, g, lambda nothing: _pad(nothing, axis, size))
        return scatter(g, axis, root, call.group)

    return call.run(lambda x: _join(call.carry(transport.gather, x, root), axis), gradient)


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


# Send and receive: what two ranks of a group do while the others go on.


@as_it_is
def send(x: tf.Tensor, to: int, group: Group | None = None) -> tf.Tensor:
    """Send a tensor to a rank, which receives it with `recv`. No other rank takes part.

    Once, before, every rank of the job calls `new_group` with the two ranks.

    Args:
        x: a tensor of any shape.
        to: position of the receiving rank.
        group: the `Group` that `to` is a position in.

    Returns:
        A token, the scalar 0 of x's dtype. Add it to this rank's loss: through it the
        gradient comes back from the receiver, whatever the token is multiplied with.
    """
    x = tf.convert_to_tensor(x)
    return _send(x, _pair(f"send(to={to})", x, to, group, sends=True))


@as_it_is
def recv(like: tf.Tensor, source: int, group: Group | None = None) -> tf.Tensor:
    """Receive the tensor that a rank sends with `send`. No other rank takes part.

    Args:
        like: a tensor of the shape and dtype that come; its values are not read. It
            has to be on the tape (`tape.watch`) if the sender's is. Its gradient is 0;
            in the second derivative, it is the receiver's token.
        source: position of the sending rank.
        group: the `Group` that `source` is a position in.
    """
    like = tf.convert_to_tensor(like)
    return _recv(like, _pair(f"recv(source={source})", like, source, group, sends=False))


def _send(x, pair):
    call = Call("send/recv", x, pair)

    def forward(x):
        call.carry(transport.broadcast, x, 0)
        return tf.zeros([], x.dtype)

    def gradient(g, token):
        # What comes back does not depend on g. It is tied to g and to the token for the second
        # derivative, which sends them.
        return _recv(tf.broadcast_to(tied(token, g), tf.shape(call.x)), _reversed(pair))

    return call.run(forward, gradient)


def _recv(like, pair):
    call = Call("send/recv", like, pair)
    return call.run(
        lambda like: call.carry(transport.broadcast, like, 0),
        lambda g, _: tf.zeros_like(like) + _send(g, _reversed(pair)),
    )


def _reversed(pair):
    return job.known_group(pair.ranks[::-1])


def _pair(text, x, other, group, sends):
    """Return the group (sender, receiver) of this rank and of position `other`."""
    group = job.whole_job() if group is None else group
    text = describe(text, x, group)
    check_member(text, group)
    check_position(text, other, group)
    if other == group.index:
        raise ValueError(f"{text}: that is this rank itself")
    ranks = (group.ranks[group.index], group.ranks[other])
    pair = job.known_group(ranks if sends else ranks[::-1])
    if pair is None:
        raise ValueError(
            f"{text}: there is no group of the two ranks; once, before, call new_group({ranks}) on "
            "every rank of the job"
        )
    return pair
