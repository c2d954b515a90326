"""The public collectives of a group. See the package docstring for the rules of use.

Each collective pairs an operation of `transport` with its gradient, another collective. To add
a collective, define such a function here or in a new file and list it in the package's
`__all__`.
"""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.call import Call, check_member, check_position, describe
from dtransformer.parallel.collectives.transport import with_dependency
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# AutoGraph would convert these functions in every `tf.function` without need.
no_autograph = tf.autograph.experimental.do_not_convert


@no_autograph
def broadcast(x: tf.Tensor, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the root's tensor on every rank.

    Args:
        x: Tensor of any shape. On the other ranks it must have the root's shape and dtype, and
            its values are ignored.
        root: Integer. Position of the source rank in the group. Defaults to `0`.
        group: `Group`, or `None` for all ranks of the job.

    Returns:
        A tensor of the shape and dtype of `x`.
    """
    call = Call("broadcast", x, group, root=root)
    return call.run(
        lambda x: call.carry(transport.broadcast, x, root),
        lambda g, _: reduce_sum(g, root, call.group),
    )


@no_autograph
def reduce_sum(x: tf.Tensor, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the sum over the group on the root, and zeros of the same shape elsewhere."""
    call = Call("reduce_sum", x, group, adds=True, root=root)
    return call.run(
        lambda x: call.at(root, call.carry(transport.all_reduce, x, "Sum"), tf.zeros_like),
        lambda g, _: broadcast(g, root, call.group),
    )


@no_autograph
def all_reduce_sum(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the sum over the group on every rank."""
    call = Call("all_reduce_sum", x, group, adds=True)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, "Sum"),
        lambda g, _: all_reduce_sum(g, call.group),
    )


@no_autograph
def all_reduce_max(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the elementwise maximum over the group on every rank.

    The gradient flows to every rank that has the maximum. In a tie, each rank receives the full
    gradient.
    """
    return _all_reduce_extreme("all_reduce_max", "Max", x, group)


@no_autograph
def all_reduce_min(x: tf.Tensor, group: Group | None = None) -> tf.Tensor:
    """Return the elementwise minimum over the group on every rank.

    Gradients flow as in `all_reduce_max`.
    """
    return _all_reduce_extreme("all_reduce_min", "Min", x, group)


def _all_reduce_extreme(function, op, x, group):
    call = Call(function, x, group)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, op),
        lambda g, y: tf.where(call.x == y, all_reduce_sum(g, call.group), tf.zeros_like(g)),
    )


@no_autograph
def gather(x: tf.Tensor, axis: int = 0, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the ranks' tensors, concatenated along an axis, on the root.

    Args:
        x: Tensor `[..., d, ...]`.
        axis: Integer. Axis of `d`. Negative values count from the end. Defaults to `0`.
        root: Integer. Position of the destination rank. Defaults to `0`.
        group: `Group` of `n` ranks, or `None` for all ranks of the job.

    Returns:
        A tensor `[..., n · d, ...]` on the root, and an empty tensor `[..., 0, ...]` elsewhere.
    """
    call = Call("gather", x, group, axis=axis, root=root)

    def gradient(g, _):
        size = call.group.size * static_or_dynamic_shape(call.x)[axis]
        g = call.at(root, g, lambda nothing: _pad(nothing, axis, size))
        return scatter(g, axis, root, call.group)

    return call.run(lambda x: _join(call.carry(transport.gather, x, root), axis), gradient)


@no_autograph
def all_gather(x: tf.Tensor, axis: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return the ranks' tensors `[..., d, ...]`, concatenated to `[..., n · d, ...]`."""
    call = Call("all_gather", x, group, axis=axis)
    return call.run(
        lambda x: _join(call.carry(transport.all_gather, x), axis),
        lambda g, _: reduce_scatter_sum(g, axis, call.group),
    )


@no_autograph
def scatter(x: tf.Tensor, axis: int = 0, root: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return this rank's shard of the root's tensor.

    Args:
        x: Tensor `[..., n · d, ...]`. On the other ranks it must have the root's shape and
            dtype, and its values are ignored.
        axis: Integer. Axis to shard. Negative values count from the end. Defaults to `0`.
        root: Integer. Position of the source rank. Defaults to `0`.
        group: `Group` of `n` ranks, or `None` for all ranks of the job.

    Returns:
        A tensor `[..., d, ...]`.
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


@no_autograph
def reduce_scatter_sum(x: tf.Tensor, axis: int = 0, group: Group | None = None) -> tf.Tensor:
    """Return this rank's shard `[..., d, ...]` of the sum of tensors `[..., n · d, ...]`."""
    call = Call("reduce_scatter_sum", x, group, adds=True, divides="axis", axis=axis)
    return call.run(
        lambda x: call.carry(transport.reduce_scatter, _split(x, axis, call.group.size)),
        lambda g, _: all_gather(g, axis, call.group),
    )


@no_autograph
def all_to_all(
    x: tf.Tensor, split_axis: int = 0, concat_axis: int = 0, group: Group | None = None
) -> tf.Tensor:
    """Send shard j to position j and return the received shards, concatenated.

    Args:
        x: Tensor. The group size `n` must divide dimension `split_axis`.
        split_axis: Integer. Axis to split. Its dimension is divided by `n`. Defaults to `0`.
        concat_axis: Integer. Axis of concatenation. Its dimension is multiplied by `n`. Defaults
            to `0`.
        group: `Group` of `n` ranks, or `None` for all ranks of the job.

    Returns:
        A tensor with the received shards in the order of the group.
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
    """Reshape `[..., n · d, ...]` to `[n, ..., d, ...]`."""
    axis = axis % x.shape.rank
    shape = static_or_dynamic_shape(x)
    split = [*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]]
    return _move(tf.reshape(x, split), axis, 0)


def _join(rows, axis):
    """Reshape `[n, ..., d, ...]` to `[..., n · d, ...]`."""
    axis = axis % (rows.shape.rank - 1)
    shape = static_or_dynamic_shape(rows)
    joined = [*shape[1 : axis + 1], shape[0] * shape[axis + 1], *shape[axis + 2 :]]
    return tf.reshape(_move(rows, 0, axis), joined)


def _pad(nothing, axis, size):
    """Pad an empty tensor `[..., 0, ...]` to zeros `[..., size, ...]` and keep it on its tape."""
    axis = axis % nothing.shape.rank
    return tf.pad(nothing, [[0, size * (i == axis)] for i in range(nothing.shape.rank)])


# Send and receive involve two ranks of a group. The other ranks do not take part.


@no_autograph
def send(x: tf.Tensor, to: int, group: Group | None = None) -> tf.Tensor:
    """Send a tensor to a rank that receives it with `recv`.

    No other rank takes part. Every rank of the job must have called `new_group` with the two
    ranks once before.

    Args:
        x: Tensor of any shape.
        to: Integer. Position of the receiving rank in `group`.
        group: `Group`, or `None` for all ranks of the job.

    Returns:
        A token, the scalar 0 in the dtype of `x`. Add it to this rank's loss, multiplied by any
        factor: the gradient from the receiver arrives through it.
    """
    x = tf.convert_to_tensor(x)
    return _send(x, _pair(f"send(to={to})", x, to, group, sends=True))


@no_autograph
def recv(like: tf.Tensor, source: int, group: Group | None = None) -> tf.Tensor:
    """Receive a tensor that a rank sends with `send`.

    No other rank takes part.

    Args:
        like: Tensor with the shape and dtype of the result. Its values are ignored. It must be on
            the tape (`tape.watch`) if the sender's tensor is. Its gradient is 0. In the second
            derivative it acts as the receiver's token.
        source: Integer. Position of the sending rank in `group`.
        group: `Group`, or `None` for all ranks of the job.

    Returns:
        The sender's tensor.
    """
    like = tf.convert_to_tensor(like)
    return _recv(like, _pair(f"recv(source={source})", like, source, group, sends=False))


def _send(x, pair):
    call = Call("send/recv", x, pair)

    def forward(x):
        call.carry(transport.broadcast, x, 0)
        return tf.zeros([], x.dtype)

    def gradient(g, token):
        # The received gradient does not depend on g. Tying it to g and to the token lets the
        # second derivative send both.
        return _recv(tf.broadcast_to(with_dependency(token, g), tf.shape(call.x)), _reversed(pair))

    return call.run(forward, gradient)


def _recv(like, pair):
    call = Call("send/recv", like, pair)
    return call.run(
        lambda like: call.carry(transport.broadcast, like, 0),
        lambda g, _: tf.zeros_like(like) + _send(g, _reversed(pair)),
    )


def _reversed(pair):
    return job.known_group(pair.ranks[::-1])


def _pair(text, x, peer, group, sends):
    """Return the group (sender, receiver) of this rank and position `other`."""
    group = job.world_group() if group is None else group
    text = describe(text, x, group)
    check_member(text, group)
    check_position(text, peer, group)
    if peer == group.index:
        raise ValueError(f"{text}: A rank cannot send to or receive from itself.")
    ranks = (group.ranks[group.index], group.ranks[peer])
    pair = job.known_group(ranks if sends else ranks[::-1])
    if pair is None:
        raise ValueError(
            f"{text}: No group of these two ranks exists. Call `new_group({ranks})` once before on "
            "every rank of the job."
        )
    return pair
