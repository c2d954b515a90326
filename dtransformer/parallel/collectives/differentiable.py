"""Collectives that are differentiable: each one's gradient is another of them.

The gradient is that of the sum of all ranks' losses. What a caller keeps to:

- Every rank of the group makes the same calls in the same order, and so do gradients:
  every rank's loss depends on the result (add `0 * result` where it does not), and
  every rank asks for the gradient.
- `x` is on every rank's `tf.GradientTape` or on none's: `tape.watch` a tensor that only
  has the right shape, as on the ranks that are not the root of a `broadcast`. Where the
  tape is around a `tf.function`, give it to the function as an argument.

Ranks whose calls, shapes or dtypes differ get a ValueError, every one of them: in eager
code at each call (for which a small message goes around first), in a `tf.function` when
it is traced. A rank that traces a function anew for a shape that the others do not have
gets it, too, while the others' function fails with a `FailedPreconditionError` of
`tf.errors`. So it does on every rank where dimensions differ that are not known when the
function is traced; where such a dimension is not divisible, it fails with an
`InvalidArgumentError` on that rank, and the others wait for it. Horovod warns of ranks
that wait, after 60 seconds.

`group=None` is the whole job; `root`, `to` and `source` are positions in the group, whose
order is that of concatenations and slices. A group of one rank works without Horovod.
Tensors may be bool, int8 to int64, uint8, uint16, float16, bfloat16 (it travels as
float32), float32 and float64; bools have no sum, and sums of small integers wrap around.

Errors name the function, the shape, the group and what is wrong:

    ValueError: an axis outside of the tensor's rank, a dimension that the group's size
        does not divide, a root outside of the group, a dtype that is not carried, a
        rank that is not in the group, or ranks that make different calls.
"""

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives.call import (
    Call,
    check_member,
    check_position,
    describe,
    tied,
)
from dtransformer.parallel.shapes import static_or_dynamic_shape

# AutoGraph would translate these functions for every `tf.function`, to no purpose.
_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def broadcast(x, root=0, group=None):
    """Return the root's tensor on every rank.

    Args:
        x: a tensor of any shape. The other ranks' have the root's shape and dtype, and
            their values are not read.
        root: position of the rank whose tensor it is.
        group: a `Group`.
    """
    call = Call("broadcast", x, group, root=root)
    return call.run(
        lambda x: call.broadcast(x, root),
        lambda g, _: reduce_sum(g, root, call.group),
    )


@_as_it_is
def reduce_sum(x, root=0, group=None):
    """Return the sum over the group on the root, zeros of the same shape elsewhere."""
    call = Call("reduce_sum", x, group, root=root)
    return call.run(
        lambda x: call.at(root, call.reduce(x, "Sum"), tf.zeros_like),
        lambda g, _: broadcast(g, root, call.group),
    )


@_as_it_is
def all_reduce_sum(x, group=None):
    """Return the sum over the group on every rank."""
    call = Call("all_reduce_sum", x, group)
    return call.run(
        lambda x: call.reduce(x, "Sum"),
        lambda g, _: all_reduce_sum(g, call.group),
    )


@_as_it_is
def all_reduce_max(x, group=None):
    """Return the elementwise maximum over the group on every rank.

    The gradient goes to every rank that holds the maximum, in full to each of a tie.
    """
    return _all_reduce_extreme("all_reduce_max", "Max", x, group)


@_as_it_is
def all_reduce_min(x, group=None):
    """Return the elementwise minimum over the group; gradients as for the maximum."""
    return _all_reduce_extreme("all_reduce_min", "Min", x, group)


def _all_reduce_extreme(function, op, x, group):
    call = Call(function, x, group)
    return call.run(
        lambda x: call.reduce(x, op),
        lambda g, y: tf.where(call.x == y, all_reduce_sum(g, call.group), tf.zeros_like(g)),
    )


@_as_it_is
def gather(x, axis=0, root=0, group=None):
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
        lambda x: _join(call.gather(x, root), axis),
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


@_as_it_is
def all_gather(x, axis=0, group=None):
    """Return the ranks' tensors [..., d, ...], concatenated to [..., n · d, ...]."""
    call = Call("all_gather", x, group, axis=axis)
    return call.run(
        lambda x: _join(call.all_gather(x), axis),
        lambda g, _: reduce_scatter_sum(g, axis, call.group),
    )


@_as_it_is
def scatter(x, axis=0, root=0, group=None):
    """Return this rank's slice of the root's tensor.

    Args:
        x: a tensor [..., n · d, ...]. The other ranks' have the root's shape and
            dtype, and their values are not read.
        axis: the axis that is cut; a negative one counts from the end.
        root: position of the rank whose tensor it is.
        group: a `Group` of n ranks.

    Returns:
        A tensor [..., d, ...].
    """
    call = Call("scatter", x, group, axis=axis, root=root)
    return call.run(
        lambda x: call.scatter(_split(x, axis, call.group.size), root),
        lambda g, _: call.at(
            root,
            gather(g, axis, root, call.group),
            lambda nothing: _pad(nothing, axis, static_or_dynamic_shape(call.x)[axis]),
        ),
    )


@_as_it_is
def reduce_scatter_sum(x, axis=0, group=None):
    """Return this rank's slice [..., d, ...] of the sum of tensors [..., n · d, ...]."""
    call = Call("reduce_scatter_sum", x, group, axis=axis)
    return call.run(
        lambda x: call.reduce_scatter(_split(x, axis, call.group.size)),
        lambda g, _: all_gather(g, axis, call.group),
    )


@_as_it_is
def all_to_all(x, split_axis=0, concat_axis=0, group=None):
    """Send slice j to rank j, and return the slices received, concatenated.

    Args:
        x: a tensor. The group's size n divides its dimension `split_axis`.
        split_axis: the axis that is cut: its dimension is divided by n.
        concat_axis: the axis of concatenation: its dimension is multiplied by n.
        group: a `Group`.
    """
    call = Call("all_to_all", x, group, split_axis=split_axis, concat_axis=concat_axis)
    return call.run(
        lambda x: _join(call.all_to_all(_split(x, split_axis, call.group.size)), concat_axis),
        lambda g, _: all_to_all(g, concat_axis, split_axis, call.group),
    )


@_as_it_is
def send(x, to, group=None):
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


@_as_it_is
def recv(like, source, group=None):
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
        call.broadcast(x, 0)
        return tf.zeros([], x.dtype)

    def gradient(g, token):
        # What comes back does not depend on g. It is tied to g and to the token for the second
        # derivative, of which they are the messages.
        return _recv(tf.broadcast_to(tied(token, g), tf.shape(call.x)), _reversed(pair))

    return call.run(forward, gradient)


def _recv(like, pair):
    call = Call("send/recv", like, pair)
    return call.run(
        lambda like: call.broadcast(like, 0),
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


def _move(x, source, destination):
    order = list(range(x.shape.rank))
    order.insert(destination, order.pop(source))
    return tf.transpose(x, order)


def _split(x, axis, count):
    """[..., n · d, ...] -> [n, ..., d, ...]"""
    axis, shape = axis % x.shape.rank, static_or_dynamic_shape(x)
    parts = [*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]]
    return _move(tf.reshape(x, parts), axis, 0)


def _join(rows, axis):
    """[n, ..., d, ...] -> [..., n · d, ...]"""
    axis, shape = axis % (rows.shape.rank - 1), static_or_dynamic_shape(rows)
    whole = [*shape[1 : axis + 1], shape[0] * shape[axis + 1], *shape[axis + 2 :]]
    return tf.reshape(_move(rows, 0, axis), whole)


def _pad(nothing, axis, size):
    """[..., 0, ...] -> zeros [..., size, ...], on the tape where `nothing` is."""
    axis = axis % nothing.shape.rank
    return tf.pad(nothing, [[0, size * (i == axis)] for i in range(nothing.shape.rank)])
