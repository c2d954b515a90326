"""Send and receive: what two ranks of a group do while the others go on.

Horovod has neither: it is a broadcast in the group of the two.
"""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.call import (
    Call,
    check_member,
    check_position,
    describe,
)
from dtransformer.parallel.collectives.differentiable import as_it_is
from dtransformer.parallel.collectives.impure import tied
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group


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
