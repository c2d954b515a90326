"""Call grouping: work items of equal signatures share calls of few functions, traced once."""

from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf


def traced_apart(function: Callable, *args, jit_compile: bool | None = None) -> Callable:
    """Return a function that TensorFlow traces, and optimizes, once for all of its calls.

    Args:
        function: a function of nested tensors.
        *args: arguments of it; others that it is called with are of their shapes and types.
        jit_compile: whether it is compiled with XLA.
    """
    traced = tf.function(
        function,
        jit_compile=jit_compile,
        autograph=False,
        experimental_attributes={"_noinline": True},  # Grappler, too, sees it once
    )
    specs = tf.nest.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x, args
    )
    with tf.init_scope():  # no device: it runs on that of each call
        return traced.get_concrete_function(*specs)


def grouped_calls(
    keys: Sequence[Hashable], sizes: Sequence[int] | None = None, most: int = 0
) -> list[list[int]]:
    """Return calls, lists of the items' positions; many of them have the same list of keys.

    Items that are alike are dealt out to as many equal calls as make the fewest different
    items in all: those of a block, where blocks are alike. What is left over comes last.

    Args:
        keys: of the items, equal where they are alike.
        sizes: of the items; None where calls may be of any size.
        most: size of a call, but for its last item's.

    Example:

    >>> grouped_calls(["kernel", "bias", "kernel", "bias", "head"], [8, 1, 8, 1, 8], 20)
    [[0, 1], [2, 3], [4]]
    """
    alike = {}
    for position, key in enumerate(keys):
        alike.setdefault(key, []).append(position)
    counts = [len(positions) for positions in alike.values()]
    number = min(
        range(1, max(counts, default=0) + 1),
        key=lambda number: sum(count // number + count % number for count in counts),
        default=0,
    )
    equal, left = [[] for _ in range(number)], []
    for positions in alike.values():
        share = len(positions) // number
        for i, call in enumerate(equal):
            call += positions[i * share : (i + 1) * share]
        left += positions[number * share :]
    sizes = [0] * len(keys) if sizes is None else sizes
    return [part for call in [*equal, left] for part in _parts(call, sizes, most)]


def grouped_calls_on(
    devices: Sequence[str | None],
    keys: Sequence[Hashable],
    sizes: Sequence[int] | None = None,
    most: int = 0,
) -> list[tuple[str | None, list[list[int]]]]:
    """Return for each device the calls of the items that are there; see `grouped_calls`.

    Args:
        devices: of the items.
        keys, sizes, most: as those of `grouped_calls`.

    Example:

    >>> grouped_calls_on(["a", "b", "a", "b"], ["kernel", "kernel", "kernel", "bias"])
    [('a', [[0], [2]]), ('b', [[1, 3]])]
    """
    found = []
    for device in dict.fromkeys(devices):
        here = [i for i, other in enumerate(devices) if other == device]
        own_sizes = None if sizes is None else [sizes[i] for i in here]
        calls = grouped_calls([keys[i] for i in here], own_sizes, most)
        found.append((device, [[here[i] for i in call] for call in calls]))
    return found


def _parts(call, sizes, most):
    """Yield the parts of a call, each of which ends as soon as it has more than the most."""
    part, size = [], 0
    for position in call:
        if size > most:
            yield part
            part, size = [], 0
        part.append(position)
        size += sizes[position]
    if part:
        yield part
