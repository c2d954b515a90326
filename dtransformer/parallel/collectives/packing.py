"""Tensors of several types that travel together: one collective for each type."""

from collections.abc import Callable


def by_dtype(collective: Callable, tensors: list, *others: list) -> list:
    """Return what a collective of lists of tensors of one type gives for tensors of any.

    Args:
        collective: a function of a list of tensors of one type, of as many items of each of
            `others`, and of the name of the type; it returns a list of as many.
        tensors: list of tensors.
        *others: lists of as many items.

    Returns:
        A list of as many, in the tensors' order.

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
    for dtype, together in positions.items():
        items = [[each[i] for i in together] for each in (tensors, *others)]
        for i, result in zip(together, collective(*items, dtype), strict=True):
            results[i] = result
    return results
