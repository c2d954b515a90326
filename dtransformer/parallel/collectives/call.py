"""Checks and names for the calls of public collectives.

The functions of this package define the operation and its gradient, and `transport` sends
the tensors. This module ensures that all ranks make the same call.
"""

import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.transport import never_constant, with_dependency
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.tracing.trace import Scoped

_gradient_of = Scoped("gradient_of_collective")
_DEFAULT_PREFIX = "dtransformer"  # Name prefix of collectives outside of gradients.


class Call:
    """A checked and named call of a collective.

    Horovod pairs the ranks' operations by name (in eager code, by type), and the operations of
    a `tf.function` run in any order. Therefore a name depends only on the group, the
    collective and the order of the calls in the function, and not on name scopes, layers or
    other traces of the rank. The name of a gradient depends on its forward operation.

    Args:
        function: String. Name of the collective.
        x: Tensor, or a value that converts to a tensor.
        group: `Group`, or `None` for all ranks of the job.
        adds: Whether the collective computes a sum, which bools do not support.
        divides: Name of the axis argument whose dimension the group size must divide, or
            `None`.
        **arguments: Other integer arguments of the collective: axes and the root.

    Raises:
        ValueError: If an argument is invalid (on every rank that made the same call), or if
            the ranks of the group made different calls (on all of them).
    """

    def __init__(
        self,
        function: str,
        x,
        group: Group | None,
        *,
        adds: bool = False,
        divides: str | None = None,
        **arguments: int,
    ):
        self.x = x = tf.convert_to_tensor(x)
        self.group = group = job.world_group() if group is None else group
        self._sorted_ranks = sorted(group.ranks)
        self._received = None
        listing = ", ".join(f"{name}={value}" for name, value in arguments.items())
        text = describe(f"{function}({listing})" if arguments else function, x, group)
        check_member(text, group)
        within = _gradient_of.get() or _DEFAULT_PREFIX
        if within != _DEFAULT_PREFIX:
            text += f", for the gradient of {within}"
        ranks = "_".join(map(str, group.ranks))
        self.name = self.scope = f"{within}/ranks_{ranks}/{function.replace('/', '_')}/"
        if group.size > 1:
            self._check_agreement(text)
        _check_dtype(text, x, adds)
        for name, value in arguments.items():
            if name == "root":
                check_position(text, value, group)
            else:
                _check_axis(text, name, value, x, group.size if name == divides else 1)

    def _check_agreement(self, text):
        """Set the name of the call, and raise on every rank if the calls of the group differ.

        This is one small all-gather: at every call in eager code, and during tracing in a
        `tf.function`, unless the same call was traced at the same place before.
        """
        memory = self.group.memory
        if _compat.is_on_a_tape([self.x]):
            text += " on a gradient tape"
        if tf.executing_eagerly():
            # Ranks may have counted different numbers of eager calls after an error.
            calls = self._exchange_texts(f"{memory.get('calls', 0)} {text}")
            counts, calls = zip(*[call.split(" ", 1) for call in calls])
            index = max(map(int, counts))
            memory["calls"] = index + 1
            self.name += str(index)
            agreed = set()
        else:
            with tf.name_scope(self.scope):
                graph = tf.compat.v1.get_default_graph()
                self.name = graph.unique_name("collective", mark_as_used=False)
            agreed = memory.setdefault((_function_names(), self.name), set())
            if text in agreed:
                return
            calls = self._exchange_texts(text, traced_before=bool(agreed))
        if len(set(calls)) > 1:
            listing = "; ".join(
                f"rank {rank}: {call}" for rank, call in zip(self._sorted_ranks, calls)
            )
            raise ValueError(
                "The ranks of a group must make the same collective call, but the calls differ. "
                + listing
            )
        agreed.add(text)

    def _exchange_texts(self, text, traced_before=False):
        """Return the texts of all ranks, ordered by rank."""

        def exchange(letters):
            return transport.concatenate(letters, self.group, self.name)

        # Horovod caches responses by shape, so pad to a length that most texts share.
        letters = np.frombuffer(f"{text}\n".encode().rjust(256), "uint8")
        with tf.init_scope():
            if traced_before:
                # Another rank may run its function instead of retracing it. Under the name of the
                # function's operation, Horovod detects the mismatch and stops both ranks.
                exchange = tf.function(exchange, autograph=False).get_concrete_function(
                    tf.TensorSpec([None], "uint8")
                )
            try:
                gathered = exchange(tf.constant(letters)).numpy().tobytes().decode()
            except tf.errors.FailedPreconditionError as error:
                if not traced_before:
                    raise
                raise ValueError(
                    f"{text}: Another rank did not retrace its function, or is at another call. "
                    f"Give all ranks tensors of the same shape ({error.message})."
                ) from error
        return [line.lstrip() for line in gathered.splitlines()]

    def run(self, forward: Callable, gradient: Callable) -> tf.Tensor:
        """Return `y = forward(x)` with the gradient `gradient(g, y)`."""

        @tf.custom_gradient
        def operate(x):
            def backward(g):
                with _gradient_of.set(self.name):
                    return gradient(tf.convert_to_tensor(g), y)

            return with_dependency(forward(x), self._received), backward

        y = operate(self.x)
        return y

    def carry(self, operation: Callable, x: tf.Tensor, *arguments) -> tf.Tensor:
        """Run a function of `transport` on `x` with the group and the name of this call."""
        if self.group.size == 1:
            return operation(x, *arguments, self.group, self.name)
        with tf.name_scope(self.scope):
            self._received = operation(never_constant(x), *arguments, self.group, "collective")
        return self._received

    def at(self, root: int, value: tf.Tensor, elsewhere: Callable) -> tf.Tensor:
        """Return `value` on the root and `elsewhere(value)` on the other ranks."""
        return value if self.group.index == root else elsewhere(value)


def describe(text: str, x: tf.Tensor, group: Group) -> str:
    """Return the description of a call, its tensor and its group for error messages."""
    return (
        f"`{text}` of a {x.dtype.name} tensor of shape {x.shape} over a group of {group.size}, "
        f"the ranks {group.ranks}"
    )


def check_member(text: str, group: Group) -> None:
    """Raise a ValueError that starts with `text` if this rank is not in the group."""
    if group.index is None:
        raise ValueError(f"{text}: Rank {job.rank()} is not in the group.")


def check_position(text: str, position: int, group: Group) -> None:
    """Raise a ValueError that starts with `text` if a position is not in the group."""
    if position not in range(group.size):
        raise ValueError(
            f"{text}: Position {position!r} is not in the group. "
            f"Choose a position from 0 to {group.size - 1}."
        )


def _check_dtype(text, x, adds):
    if x.dtype.name not in transport.DTYPES:
        allowed = ", ".join(sorted(transport.DTYPES))
        raise ValueError(f"{text}: Horovod supports {allowed}. Cast the tensor.")
    if x.dtype == tf.bool and adds:
        raise ValueError(f"{text}: Bools have no sum. Cast the tensor or use `all_reduce_max`.")


def _check_axis(text, name, axis, x, divisor):
    rank = x.shape.rank
    if rank is None:
        raise ValueError(f"{text}: The tensor's rank is unknown. Set it with `tf.ensure_shape`.")
    if axis not in range(-rank, rank):
        allowed = f"Choose {-rank} to {rank - 1}." if rank else "A scalar has no axis."
        raise ValueError(f"{text}: `{name}={axis!r}` is outside of the tensor's rank. {allowed}")
    size = x.shape[axis]
    if size is not None and size % divisor:
        raise ValueError(
            f"{text}: Dimension {size} of `{name}={axis}` is not divisible by the group size "
            f"{divisor}. Pad the tensor or choose another axis."
        )


def _function_names():
    """Return the names of the functions being traced, without the digits that TensorFlow adds."""
    graph = tf.compat.v1.get_default_graph()
    names = []
    while graph is not None and graph.building_function:
        names.append(re.sub(r"\d", "", graph.name))
        graph = graph.outer_graph
    return tuple(names)
