"""Packing: several sentences share a row of fixed length, so that little padding is needed.

Sentences are assigned to rows by best-fit decreasing bin packing, here for two sides together.

Reference:
    Johnson et al., 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms".
"""

import numpy as np

from dtransformer.datasets.batch_plan import check_one_size, check_rows
from dtransformer.errors import InputError


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign sentence pairs to rows by best fit.

    Each pair goes to the row with the least sufficient room, or to a new row. The room of a row is
    the smaller of its two sides' rooms.

    Args:
        lengths: int [N, 2], number of tokens of both sides. Descending order packs best.
        capacity: Integer. Number of tokens of a row on each side. No length may exceed it.

    Returns:
        int64 [N], the row index of each pair.

    Example:

    >>> pack(np.array([[5, 4], [4, 4], [2, 3]]), capacity=8).tolist()
    [0, 1, 0]
    """
    rows = np.empty(len(lengths), np.int64)
    room = [[] for _ in range(capacity + 1)]  # room[n]: rows with room for n tokens on both sides.
    free = []  # Free tokens of each row's two sides.
    not_empty = 0  # Bit n is set if room[n] has rows.
    for pair, (source, target) in enumerate(lengths.tolist()):
        need = max(source, target)
        fitting = not_empty >> need << need
        if fitting:
            size = (fitting & -fitting).bit_length() - 1
            row = room[size].pop()
            if not room[size]:
                not_empty ^= 1 << size
        else:
            row = len(free)
            free.append([capacity, capacity])
        free[row][0] -= source
        free[row][1] -= target
        size = min(free[row])
        room[size].append(row)
        not_empty |= 1 << size
        rows[pair] = row
    return rows


def rows_per_batch(
    packed_length: int,
    lengths: np.ndarray,
    num_shards: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> int:
    """Return the number of rows of a global batch.

    Args:
        packed_length: Integer. Number of tokens of a row.
        lengths: int [N], the longer side of every pair, including the start or end token.
        num_shards: Integer. Number of data ranks that share a batch.
        batch_size: Integer. Number of rows. Specify either `batch_size` or `batch_tokens`.
        batch_tokens: Integer. Number of tokens of one side.

    Raises:
        InputError: If a pair does not fit into a row, not exactly one of `batch_size` and
            `batch_tokens` is specified, or there are fewer rows than data ranks.
    """
    if len(lengths) and packed_length < lengths.max():
        raise InputError(
            f"`{packed_length=}` is less than the longest sentence with its start or end token, "
            f"{lengths.max()} tokens. Increase it or lower `max_length`."
        )
    check_one_size(batch_size, batch_tokens)
    rows = batch_size if batch_tokens is None else batch_tokens // packed_length
    description = f"`{batch_size=}`" if batch_tokens is None else f"`{batch_tokens=}`"
    check_rows(rows, num_shards, f"{description} is {rows} rows of `{packed_length=}`, which")
    return rows


def packed_rows(
    lengths: np.ndarray, order: np.ndarray, capacity: int, rng: np.random.Generator | None
) -> list[np.ndarray]:
    """Pack items into rows, longest first.

    The rows have the same lengths for every `order`, so their number depends only on the lengths.

    Args:
        lengths: int [N, 2], number of tokens of both sides.
        order: int [n], indices of the items to pack. Items of equal length are packed in this
            order.
        capacity: Integer. Number of tokens of a row on each side.
        rng: Random generator for the order of the rows. `None` keeps the order of their creation.

    Returns:
        List of arrays of item indices, one for each row.
    """
    sides = lengths[order]
    by_length = np.lexsort((-sides[:, 1], -sides[:, 0], -sides.max(axis=1)))
    order = order[by_length]
    row_ids = pack(sides[by_length], capacity)
    ends = np.cumsum(np.bincount(row_ids))
    rows = np.split(order[np.argsort(row_ids, kind="stable")], ends[:-1])
    return rows if rng is None else [rows[index] for index in rng.permutation(len(rows))]


def plan_packed_batches(
    lengths: np.ndarray,
    capacity: int,
    batch_rows: int,
    *,
    shuffle: bool = True,
    drop_remainder: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> list[list[np.ndarray]]:
    """Assign the sentence pairs of an epoch to packed rows and batches.

    Args:
        lengths, capacity: See `packed_rows`.
        batch_rows: Integer. Number of rows of a global batch.
        shuffle, drop_remainder, seed, epoch: See `plan_batches`.

    Returns:
        List of batches. A batch is a list of rows, and a row is an array of pair indices.
    """
    rng = np.random.default_rng([seed, epoch]) if shuffle else None
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    rows = packed_rows(lengths, order, capacity, rng)
    batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
    return batches[:-1] if drop_remainder and len(batches[-1]) < batch_rows else batches
