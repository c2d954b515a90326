"""One call of a collective: what is checked, how it is named, what Horovod carries.

`collectives` says what is sent and what the gradient is; all that Horovod and TensorFlow
need for it is here.
"""

import re

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record  # for `should_record_backprop` alone

from dtransformer.parallel import job, trace

# The dtypes that travel as another one: Horovod has no bfloat16, and not every reduction.
_MOVED = {"bfloat16": "float32"}
_REDUCED = {**_MOVED, **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), "int32")}
_CARRIED = {*_REDUCED, "int32", "int64", "float16", "float32", "float64"}

# The axes that have to be divisible.
_CUT = {("scatter", "axis"), ("reduce_scatter_sum", "axis"), ("all_to_all", "split_axis")}

_TOP = "dtransformer"  # of the names of collectives that belong to no gradient


class Call:
    """One call of a collective: checked, named, and what it sends.

    Horovod pairs the ranks' operations by name (in eager code, by type), and those of a
    `tf.function` run in any order. So a name follows from the group, the collective and
    the order of calls in the function alone, whatever scopes, layers or other traces the
    rank has; and that of a gradient from the operation that it belongs to.

    Args:
        function: name of the collective.
        x: its tensor.
        group: a `Group`, or None for the whole job.
        **places: its other arguments, axes and the root.
    """

    def __init__(self, function, x, group, **places):
        self.x = x = tf.convert_to_tensor(x)
        self.group = group = job.whole_job() if group is None else group
        self._ordered = sorted(group.ranks)
        self._received = None
        arguments = ", ".join(f"{name}={value}" for name, value in places.items())
        text = describe(f"{function}({arguments})" if places else function, x, group)
        check_member(text, group)
        within = trace.current().collective or _TOP
        if within != _TOP:
            text += f", for the gradient of {within}"
        ranks = "_".join(map(str, group.ranks))
        self.name = self.scope = f"{within}/ranks_{ranks}/{function.replace('/', '_')}/"
        if group.size > 1:
            self._check_agreement(text)
        _check_arguments(text, function, x, group, places)

    def _check_agreement(self, text):
        """Name the call, and raise on every rank of the group if they do not make the same.

        One small all-gather: in eager code at every call, in a `tf.function` when it is
        traced, unless the same call was traced at the same place before.
        """
        memory = self.group.memory
        if record.should_record_backprop([self.x]):
            text += " on a gradient tape"
        if tf.executing_eagerly():
            # With the number of eager calls, which ranks may count differently after an error.
            calls = self._gather_text(f"{memory.get('calls', 0)} {text}")
            numbers, calls = zip(*[call.split(" ", 1) for call in calls])
            number = max(map(int, numbers))
            memory["calls"] = number + 1
            self.name += str(number)
            agreed = set()
        else:
            with tf.name_scope(self.scope):
                graph = tf.compat.v1.get_default_graph()
                self.name = graph.unique_name("wire", mark_as_used=False)
            agreed = memory.setdefault((_names_of_functions(), self.name), set())
            if text in agreed:
                return
            calls = self._gather_text(text, traced_before=bool(agreed))
        if len(set(calls)) > 1:
            listing = "; ".join(f"rank {rank}: {call}" for rank, call in zip(self._ordered, calls))
            raise ValueError(
                "ranks make different calls, and every rank of a group has to make the same. "
                + listing
            )
        agreed.add(text)

    def _gather_text(self, text, traced_before=False):
        """Return the texts of all ranks, in the order of their numbers."""

        def exchange(letters):
            return job.horovod().allgather(
                letters, name=self.name, process_set=self.group.process_set
            )

        # Mostly of one length, which Horovod remembers.
        letters = np.frombuffer(f"{text}\n".encode().rjust(256), "uint8")
        with tf.init_scope():
            if traced_before:
                # Another rank may not trace its function anew but run it. Under the name of
                # its operation, Horovod sees two that differ and stops both.
                exchange = tf.function(exchange, autograph=False).get_concrete_function(
                    tf.TensorSpec([None], "uint8")
                )
            try:
                everyone = exchange(tf.constant(letters)).numpy().tobytes().decode()
            except tf.errors.FailedPreconditionError as error:
                if not traced_before:
                    raise
                raise ValueError(
                    f"{text}: another rank does not trace its function anew, or is at another "
                    f"call; give all ranks tensors of the same shape ({error.message})"
                ) from error
        return [line.lstrip() for line in everyone.splitlines()]

    def run(self, forward, gradient):
        """Return y = `forward(x)`, whose gradient is `gradient(g, y)`."""

        @tf.custom_gradient
        def operate(x):
            def backward(g):
                with trace.scope(collective=self.name):
                    return gradient(tf.convert_to_tensor(g), y)

            return tied(forward(x), self._received), backward

        y = operate(self.x)
        return y

    def at(self, root, value, elsewhere):
        """Return `value` on the root, `elsewhere(value)` on the other ranks."""
        return value if self.group.index == root else elsewhere(value)

    # What is sent. Rows [n, ...] have one for each rank, in the group's order.

    def broadcast(self, x, root):
        return self._carry("broadcast", x, x.shape, root_rank=self.group.ranks[root])

    def reduce(self, x, op):
        return self._carry("allreduce", x, x.shape, op=op)

    def all_gather(self, x):
        return self._in_order(self._carry("allgather", x[None], [self.group.size, *x.shape]))

    def all_to_all(self, rows):
        return self._in_order(self._carry("alltoall", self._sorted(rows), rows.shape))

    def reduce_scatter(self, rows):
        return self._carry("reducescatter", self._sorted(rows), [1, *rows.shape[1:]], op="Sum")[0]

    def gather(self, x, root):
        # To the root goes one row, to the others none.
        sizes = [int(rank == self.group.ranks[root]) for rank in self._ordered]
        is_root = self.group.index == root
        shape = [self.group.size if is_root else 0, *x.shape]
        rows = self._carry("alltoall", x[None], shape, splits=sizes)
        return self._in_order(rows) if is_root else rows

    def scatter(self, rows, root):
        # The root sends a row to each, the others none.
        is_root = self.group.index == root
        sent = self._sorted(rows) if is_root else rows[:0]
        sizes = [int(is_root)] * self.group.size
        return self._carry("alltoall", sent, [1, *rows.shape[1:]], splits=sizes)[0]

    def _sorted(self, rows):
        """Put rows from the group's order into Horovod's, which is sorted by rank."""
        return _take(rows, [self.group.ranks.index(rank) for rank in self._ordered])

    def _in_order(self, rows):
        """Put rows from Horovod's order into the group's."""
        return _take(rows, [self._ordered.index(rank) for rank in self.group.ranks])

    def _carry(self, operation, x, shape, op=None, **options):
        """Return what a Horovod operation makes of x, of the static shape `shape`."""
        if self.group.size == 1:
            return x
        hvd = job.horovod()
        if op is not None:
            options["op"] = getattr(hvd, op)
        dtype, carriers = x.dtype, _REDUCED if op else _MOVED
        x = tf.cast(x, carriers.get(dtype.name, dtype))
        with tf.name_scope(self.scope):
            y = getattr(hvd, operation)(
                _never_constant(x), name="wire", process_set=self.group.process_set, **options
            )
            y = y[0] if "splits" in options else y
            y.set_shape(shape)
            self._received = y
        return tf.cast(y, dtype)


# TensorFlow takes Horovod's operations for pure functions. In a `tf.function` it would
# compute one of a constant only once, make one of two that look alike, and drop one whose
# result is not used, each on some ranks and not on others.


def _never_constant(x):
    """Return x, sliced from a 0 that TensorFlow cannot compute beforehand, without a copy."""
    if tf.executing_eagerly():
        return x
    rank = x.shape.rank
    if rank not in range(1, 9):  # a scalar, an unknown rank, or more than `Slice` can do
        return tf.reshape(_never_constant(tf.reshape(x, [-1])), tf.shape(x))
    with tf.device("CPU:0"):
        zeros = tf.raw_ops.RandomUniformInt(shape=[rank], minval=0, maxval=1, seed=1, seed2=1)
    return tf.raw_ops.Slice(input=x, begin=zeros, size=[-1] * rank)


def tied(value, y):
    """Return `value`, for which y has to be computed first, and compute y in any case.

    "In any case" does not hold in the functions that TensorFlow makes of gradients where
    the tape is around a `tf.function`: they compute what their results depend on.
    """
    if y is None or tf.executing_eagerly():
        return value
    part = tf.reshape(y, [-1])[:1]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[part])]):
        return tf.identity(value)


def _take(rows, order):
    return rows if order == sorted(order) else tf.gather(rows, order)


def describe(text, x, group):
    return (
        f"{text} of shape {x.shape}, {x.dtype.name}, over a group of {group.size}, "
        f"the ranks {group.ranks}"
    )


def check_member(text, group):
    if group.index is None:
        raise ValueError(f"{text}: rank {job.rank()} is not in the group")


def check_position(text, position, group):
    if position not in range(group.size):
        raise ValueError(
            f"{text}: position {position!r} is not in the group, which has 0 to {group.size - 1}"
        )


def _names_of_functions():
    """Return the names of the functions being traced, without TensorFlow's numbers."""
    graph, names = tf.compat.v1.get_default_graph(), []
    while graph is not None and graph.building_function:
        names.append(re.sub(r"\d", "", graph.name))
        graph = graph.outer_graph
    return tuple(names)


def _check_arguments(text, function, x, group, places):
    """Raise if a call is wrong. Ranks that agree on it all raise."""
    if x.dtype.name not in _CARRIED:
        raise ValueError(f"{text}: Horovod carries {', '.join(sorted(_CARRIED))}; cast the tensor")
    if x.dtype == tf.bool and "sum" in function:
        raise ValueError(f"{text}: bools have no sum; cast the tensor, or use all_reduce_max")
    for name, value in places.items():
        if name == "root":
            check_position(text, value, group)
            continue
        rank = x.shape.rank
        if rank is None:
            raise ValueError(f"{text}: the tensor's rank has to be known; use tf.ensure_shape")
        if value not in range(-rank, rank):
            allowed = f"it may be {-rank} to {rank - 1}" if rank else "a scalar has no axis"
            raise ValueError(f"{text}: {name} {value!r} is outside of the tensor's rank; {allowed}")
        size = x.shape[value]
        if (function, name) in _CUT and size is not None and size % group.size:
            raise ValueError(
                f"{text}: dimension {size} of {name} {value} is not divisible by the group's size "
                f"{group.size}; pad it, or choose another axis"
            )
