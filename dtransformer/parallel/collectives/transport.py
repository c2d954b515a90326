"""Horovod operations for tensors of every supported dtype.

All communication goes through this module. Tensors of every dtype in `DTYPES` are accepted.
Operations that only move data send an unsupported dtype as the bits of another one. Reductions
compute in a dtype that can represent the result.

Arguments and results that contain several tensors are rows `[d, ...]`, one for each of the
group's `d` ranks, in the order of the group. A group of one rank sends nothing. The ranks' calls
are not compared. `call` does that for the public collectives.
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import logical_gpus
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.tracing.trace import Scoped

# Guards that keep TensorFlow from treating Horovod operations as pure functions.


def never_constant(x: tf.Tensor) -> tf.Tensor:
    """Return `x`, sliced at a zero offset that TensorFlow cannot fold, without a copy.

    TensorFlow would run a collective of a constant only once, at compilation. Ranks with
    other inputs would then wait for it.
    """
    if tf.executing_eagerly():
        return x
    rank = x.shape.rank
    if rank not in range(1, 9):  # A scalar, an unknown rank, or a rank above the limit of `Slice`.
        return tf.reshape(never_constant(tf.reshape(x, [-1])), tf.shape(x))
    with tf.device("CPU:0"):
        zeros = tf.raw_ops.RandomUniformInt(shape=[rank], minval=0, maxval=1, seed=1, seed2=1)
    y = tf.raw_ops.Slice(input=x, begin=zeros, size=[-1] * rank)
    y.set_shape(x.shape)
    return y


def with_dependency(value: tf.Tensor, y: tf.Tensor | None) -> tf.Tensor:
    """Return `value` with a control dependency on `y`, so that `y` is always computed.

    If a tape surrounds a `tf.function`, TensorFlow's gradient functions still drop `y` unless a
    result depends on it.
    """
    if y is None or tf.executing_eagerly():
        return value
    first = tf.reshape(y, [-1])[:1]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[first])]):
        return tf.identity(value)


_global_names = Scoped("global_collective_names", False)
_traced_graphs = Scoped("traced_graphs")

# Maps dtypes that Horovod lacks to dtypes of the same width.
_BITCAST_DTYPES = {"bfloat16": "uint16"}
# Maps dtypes that Horovod cannot reduce to the dtypes of sums, maxima and minima.
_REDUCE_DTYPES = {
    "bfloat16": "float32",
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16"), "int32"),
}
# The same map for sums that this rank computes.
_SUM_DTYPES = {**_REDUCE_DTYPES, "float16": "float32"}

DTYPES = (*sorted(_REDUCE_DTYPES), "float16", "float32", "float64", "int32", "int64")


def broadcast(x: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the root's tensor on every rank.

    Args:
        x: Tensor `[...]`, of the root's shape and dtype on every rank.
        root: Integer. Position of the source rank in the group.
        group: `Group`.
        name: Name of the operation, identical on all ranks and unique among pending collectives.
    """
    if group.size == 1:
        return x
    y = _move("broadcast", x, group, name, root_rank=group.ranks[root])
    y.set_shape(x.shape)
    return y


def broadcast_together(tensors: list, root: int, group: Group, name: str) -> list:
    """Return the root's tensors, of any shapes and dtypes, with one broadcast per dtype."""

    def as_one(tensors, dtype):
        flat = tf.concat([tf.reshape(x, [-1]) for x in tensors], 0)
        flat = broadcast(flat, root, group, f"{name}_{dtype}")
        split = tf.split(flat, [tf.size(x) for x in tensors], num=len(tensors))
        return [tf.reshape(part, tf.shape(x)) for part, x in zip(split, tensors)]

    return by_dtype(as_one, tensors)


def all_gather(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors `[...]` as rows `[d, ...]`."""
    if group.size == 1:
        return x[None]
    rows = _move("allgather", x[None], group, name)
    rows.set_shape([group.size, *x.shape])
    return _from_rank_order(rows, group)


def concatenate(x: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors `[nᵢ, ...]`, concatenated in the order of ranks: `[Σ nᵢ, ...]`."""
    return x if group.size == 1 else _move("allgather", x, group, name)


def all_to_all(rows: tf.Tensor, group: Group, name: str) -> tf.Tensor:
    """Send row i to position i and return the rows `[d, ...]` received from all positions."""
    if group.size == 1:
        return rows
    received = _move("alltoall", _to_rank_order(rows, group), group, name)
    received.set_shape(rows.shape)
    return _from_rank_order(received, group)


def gather(x: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the ranks' tensors `[...]` as rows `[d, ...]` on the root and `[0, ...]` elsewhere."""
    if group.size == 1:
        return x[None]
    is_root = group.index == root
    splits = [int(rank == group.ranks[root]) for rank in sorted(group.ranks)]
    rows, _ = _move("alltoall", x[None], group, name, splits=splits)
    rows.set_shape([group.size if is_root else 0, *x.shape])
    return _from_rank_order(rows, group) if is_root else rows


def scatter(rows: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
    """Return the row `[...]` at this rank's position of the root's rows `[d, ...]`."""
    if group.size == 1:
        return rows[0]
    splits = [int(group.index == root)] * group.size  # Only the root sends.
    received, _ = _move("alltoall", _to_rank_order(rows, group), group, name, splits=splits)
    received.set_shape([1, *rows.shape[1:]])
    return received[0]


def all_reduce(x: tf.Tensor, op: str, group: Group, name: str) -> tf.Tensor:
    """Return the sum of the ranks' tensors, or another reduction, on every rank.

    Args:
        x: Tensor of the same shape and dtype on every rank.
        op: Horovod reduction: `"Sum"`, `"Max"`, `"Min"` or `"Product"`.
        group: `Group`.
        name: See `broadcast`.
    """
    if group.size == 1:
        return x
    y = never_constant(tf.cast(x, _REDUCE_DTYPES.get(x.dtype.name, x.dtype)))
    y = _run("allreduce", y, group, name, op=getattr(job.horovod(), op))
    return tf.cast(y, x.dtype)


def all_reduce_together(tensors: list, group: Group, name: str) -> list:
    """Return the sums of the ranks' tensors of one dtype, with one grouped operation."""
    if group.size == 1:
        return tensors
    dtype = tensors[0].dtype
    sums = [tf.cast(x, _REDUCE_DTYPES.get(dtype.name, dtype)) for x in tensors]
    sums = _run("grouped_allreduce", sums, group, name, op=job.horovod().Sum)
    return [tf.cast(total, dtype) for total in sums]


def reduce_scatter(rows: tf.Tensor, group: Group, name: str, dtype=None) -> tf.Tensor:
    """Return the row `[...]` at this rank's position of the sum of the ranks' rows `[d, ...]`.

    If Horovod cannot add the dtype, or would add it in 16 bits, each rank sends the rows with an
    all-to-all and adds the received rows in a wider dtype. This halves the bytes sent.

    Args:
        rows: Tensor `[d, ...]` of the same shape and dtype on every rank.
        group: `Group`.
        name: See `broadcast`.
        dtype: Dtype of the result. Defaults to the dtype of `rows`.
    """
    dtype_name = rows.dtype.name
    if group.size == 1:
        total = rows[0]
    elif dtype_name not in _SUM_DTYPES:
        ordered = _to_rank_order(rows, group)
        total = _run("reducescatter", ordered, group, name, op=job.horovod().Sum)
        total.set_shape([1, *rows.shape[1:]])
        total = total[0]
    else:
        total = tf.reduce_sum(
            tf.cast(all_to_all(rows, group, name), _SUM_DTYPES.get(dtype_name, dtype_name)), 0
        )
    return tf.cast(total, dtype_name if dtype is None else dtype)


def reduce_scatter_sections(sections: list, group: Group, name: str, dtype=None) -> tf.Tensor:
    """Return the sum of the ranks' sections at this rank's position.

    Each rank sends every other rank only that rank's section. Sections may differ in size.

    Args:
        sections: List of `d` tensors `[nᵢ]`, of the same shapes and dtype on every rank.
        group: `Group`.
        name: See `broadcast`.
        dtype: Dtype of the result. Defaults to the dtype of the sections.
    """
    dtype_name = sections[0].dtype.name
    if group.size == 1:
        return tf.cast(sections[0], dtype_name if dtype is None else dtype)
    order = _rank_order(group)
    splits = [sections[i].shape[0] for i in order]
    packed = tf.concat([sections[i] for i in order], 0)
    received, received_splits = _move("alltoall", packed, group, name, splits=splits)
    # TensorFlow would skip the operation if this rank's section is empty.
    received = with_dependency(received, received_splits)
    rows = tf.reshape(received, [group.size, sections[group.index].shape[0]])
    total = tf.reduce_sum(tf.cast(rows, _SUM_DTYPES.get(dtype_name, dtype_name)), 0)
    return tf.cast(total, dtype_name if dtype is None else dtype)


def all_gather_sections(x: tf.Tensor, sizes: list[int], group: Group, name: str) -> list:
    """Return the tensors `[nᵢ]` of all ranks as a list in the order of the group.

    Args:
        x: Tensor `[n]` of the same dtype on every rank.
        sizes: List of the sizes `nᵢ` by position.
        group: `Group`.
        name: See `broadcast`.
    """
    if group.size == 1:
        return [x]
    if not sizes[
        group.index
    ]:  # TensorFlow folds empty tensors into constants, so send one element.
        x = never_constant(tf.zeros([1], x.dtype))
    order = _rank_order(group)
    sent = [max(size, 1) for size in sizes]
    gathered = _move("allgather", x, group, name)
    gathered.set_shape([sum(sent)])
    parts = tf.split(gathered, [sent[i] for i in order])
    return [parts[order.index(i)][: sizes[i]] for i in range(group.size)]


def _move(operation: str, x: tf.Tensor, group: Group, name: str, **options):
    """Run a Horovod operation that only moves data on a tensor of any dtype.

    With `splits` in `options`, return a tuple of the received tensor and its size from each rank.
    """
    bits = _BITCAST_DTYPES.get(x.dtype.name)
    sent = tf.bitcast(x, bits) if bits else x
    received = _run(operation, sent, group, name, **options)
    received, *splits = received if "splits" in options else [received]
    received = tf.bitcast(received, x.dtype) if bits else received
    return (received, *splits) if splits else received


def global_names() -> contextlib.AbstractContextManager:
    """Give collectives inside the `with` block names without the surrounding name scopes.

    TensorFlow numbers the scopes of branches depending on the rest of a function, which differs
    between ranks that update different weights.
    """
    return _global_names.set(True)


def recording_graphs(graphs: dict) -> contextlib.AbstractContextManager:
    """Record the graphs of functions that are traced with collectives in the `with` block.

    Args:
        graphs: Dict to fill. Keys are `tf.Graph`s of outermost functions, and values are `None`.
    """
    return _traced_graphs.set(graphs)


def _record_graph():
    if _traced_graphs.get() is None or tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph.outer_graph, type(graph)):
        graph = graph.outer_graph
    _traced_graphs.get()[graph] = None


def _run(operation, x, group, name, **options):
    """Run a Horovod operation, which pairs ranks by name and group."""
    _record_graph()
    key = {"ignore_name_scope": _global_names.get()}
    key |= {"name": name, "process_set": group.process_set}
    # NCCL does not accept two ranks on one GPU, so logical GPUs communicate over the host.
    place = tf.device("/CPU:0") if logical_gpus() > 1 else contextlib.nullcontext()
    with job.record_wait(f"{operation} {name!r}", group.ranks), place:
        return getattr(job.horovod(), operation)(x, **key, **options)


# Horovod orders a group's rows by rank.


def _rank_order(group: Group) -> list[int]:
    """Return the positions of a group's ranks, sorted by rank."""
    return [group.ranks.index(rank) for rank in sorted(group.ranks)]


def _to_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Reorder rows from the order of the group to the order of ranks."""
    return _take(rows, _rank_order(group))


def _from_rank_order(rows: tf.Tensor, group: Group) -> tf.Tensor:
    """Reorder rows from the order of ranks to the order of the group."""
    return _take(rows, [sorted(group.ranks).index(rank) for rank in group.ranks])


def _take(rows, order):
    return rows if order == sorted(order) else tf.gather(rows, order)


def by_dtype(collective: Callable, tensors: list, *others: list) -> list:
    """Apply a collective for tensors of one dtype to tensors of mixed dtypes.

    Args:
        collective: Function of a list of tensors of one dtype, the matching items of each list
            in `others`, and the name of the dtype. It returns a list of the same length.
        tensors: List of tensors.
        *others: Lists of the same length as `tensors`.

    Returns:
        A list of the results in the order of `tensors`.

    Example:

    >>> import numpy as np
    >>> mixed = [np.int8(1), np.float32(2), np.int8(3)]
    >>> by_dtype(lambda tensors, names, dtype: [
    ...     f"{name}: one of {len(tensors)} {dtype}" for name in names], mixed, "abc")
    ['a: one of 2 int8', 'b: one of 1 float32', 'c: one of 2 int8']
    """
    positions = {}
    for position, x in enumerate(tensors):
        positions.setdefault(x.dtype.name, []).append(position)
    results = [None] * len(tensors)
    for dtype, indices in positions.items():
        arguments = [[items[i] for i in indices] for items in (tensors, *others)]
        for i, result in zip(indices, collective(*arguments, dtype), strict=True):
            results[i] = result
    return results
