"""Reference results of collectives in NumPy, and their valid inputs and arguments."""

import itertools

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives

SHAPES = [(), (1,), (2, 3), (8, 10), (99, 77), (2, 4, 6, 8)]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8", "bool"]

# Collective -> NumPy function from the list of inputs to the list of results, in the group's order.


def split(x, axis, count):
    return np.split(x, count, axis)


REFERENCE = {
    "broadcast": lambda xs, root: [xs[root]] * len(xs),
    "reduce_sum": lambda xs, root: [
        add(xs) if i == root else np.zeros_like(x) for i, x in enumerate(xs)
    ],
    "all_reduce_sum": lambda xs: [add(xs)] * len(xs),
    "all_reduce_max": lambda xs: [np.asarray(np.max(xs, 0))] * len(xs),
    "all_reduce_min": lambda xs: [np.asarray(np.min(xs, 0))] * len(xs),
    "gather": lambda xs, axis, root: [
        np.concatenate(xs if i == root else [x.take([], axis)], axis) for i, x in enumerate(xs)
    ],
    "all_gather": lambda xs, axis: [np.concatenate(xs, axis)] * len(xs),
    "scatter": lambda xs, axis, root: split(xs[root], axis, len(xs)),
    "reduce_scatter_sum": lambda xs, axis: split(add(xs), axis, len(xs)),
    "all_to_all": lambda xs, split_axis, concat_axis: [
        np.concatenate([split(x, split_axis, len(xs))[i] for x in xs], concat_axis)
        for i in range(len(xs))
    ],
    # Position 0 sends to the last position. The other ranks do nothing.
    "send_recv": lambda xs: [np.zeros([], xs[0].dtype), *xs[1:-1], xs[0]],
}


def add(xs):
    return np.asarray(sum(xs[1:], xs[0]), xs[0].dtype)  # The dtype stays, so integers wrap.


def send_recv(x, group):
    if group.index == 0:
        return collectives.send(x, group.size - 1, group)
    return collectives.recv(x, 0, group) if group.index == group.size - 1 else x


def call(name, x, group, **arguments):
    function = send_recv if name == "send_recv" else getattr(collectives, name)
    return function(x, group=group, **arguments)


def valid_arguments(name, shape, count):
    """Return all valid arguments of a collective for a shape in a group of `count` ranks."""
    axes = range(len(shape))
    divisible = [axis for axis in axes if shape[axis] % count == 0]
    roots = sorted({0, count - 1})
    if name in ("broadcast", "reduce_sum"):
        return [{"root": root} for root in roots]
    if name in ("gather", "scatter"):
        usable = axes if name == "gather" else divisible
        return [{"axis": axis, "root": roots[axis % 2 - 1]} for axis in usable]
    if name == "all_gather":
        return [{"axis": axis} for axis in axes] + [{"axis": -1}] * bool(shape)
    if name == "reduce_scatter_sum":
        return [{"axis": axis} for axis in divisible]
    if name == "all_to_all":
        pairs = itertools.product(divisible, axes)
        return [{"split_axis": split, "concat_axis": concat} for split, concat in pairs]
    return [{}]


def inputs(shape, dtype, count):
    """Return one array for each rank, identical on all ranks. Float sums are exact in every dtype."""
    rng = np.random.default_rng(len(shape) + 1)
    if dtype == "bool":
        return [np.asarray(rng.integers(0, 2, shape), bool) for _ in range(count)]
    if dtype.endswith(("int8", "int32", "int64")):
        limits = np.iinfo(dtype if dtype.endswith("8") else "int16")
        return [
            np.asarray(rng.integers(limits.min, limits.max + 1, shape), dtype) for _ in range(count)
        ]
    numpy_type = tf.as_dtype(dtype).as_numpy_dtype
    return [np.asarray(rng.integers(-8, 8, shape) / 4, numpy_type) for _ in range(count)]
