"""Packing: sentences one after the other in rows of one length, so that nothing is padded.

Which sentences share a row is best-fit decreasing bin packing (Johnson et al., 1974, "Worst-case
performance bounds for simple one-dimensional packing algorithms"), here of two sides at once.
"""

import numpy as np

from dtransformer.datasets.batch_plan import check_one_size, check_rows
from dtransformer.errors import InputError


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the number of the row that each sentence pair is put in.

    A pair is put in the row with the least room that has enough of it, or in a new one.

    Args:
        lengths: int [N, 2], tokens of both sides; the longest first is best.
        capacity: number of tokens of a row on each side.

    Example:

    >>> pack(np.array([[5, 4], [4, 4], [2, 3]]), capacity=8).tolist()
    [0, 1, 0]
    """
    rows = np.empty(len(lengths), np.int64)
    room = [[] for _ in range(capacity + 1)]  # tokens that both sides have room for -> rows
    free, not_empty = [], 0  # of each row, both sides; bit n is set where room[n] has a row
    for number, (source, target) in enumerate(lengths.tolist()):
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
        rows[number] = row
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
        packed_length: number of tokens of a row.
        lengths: int [N], the longer side of every pair, the start or end token included.
        num_shards: number of data ranks that share a batch.
        batch_size: number of rows; or
        batch_tokens: number of tokens of one side.

    Raises:
        InputError: a pair does not fit into a row, the size is given twice or not at all, or there
            is less than a row for each data rank.
    """
    if len(lengths) and packed_length < lengths.max():
        raise InputError(
            f"packed_length={packed_length} does not hold the longest sentence, {lengths.max()} "
            "tokens with its start or end: give more, or lower max_length"
        )
    check_one_size(batch_size, batch_tokens)
    rows = batch_size if batch_tokens is None else batch_tokens // packed_length
    given = f"batch_size={batch_size}" if batch_tokens is None else f"{batch_tokens=}"
    check_rows(rows, num_shards, f"{given} is {rows} rows of {packed_length=}, which")
    return rows


def packed_rows(
    lengths: np.ndarray, order: np.ndarray, capacity: int, rng: np.random.Generator | None
) -> list[np.ndarray]:
    """Return the rows that items are packed into, the longest first: arrays of their numbers.

    The same lengths make the same rows, whoever has them: so the number of rows depends on the
    lengths only.

    Args:
        lengths: int [N, 2], tokens of both sides.
        order: int [n], the items; of the same lengths the first one of these comes first.
        capacity: number of tokens of a row on each side.
        rng: what the order of the rows is drawn from; None for that in which they were made.
    """
    sides = lengths[order]
    by_length = np.lexsort((-sides[:, 1], -sides[:, 0], -sides.max(axis=1)))
    order, row_of = order[by_length], pack(sides[by_length], capacity)
    ends = np.cumsum(np.bincount(row_of))
    rows = np.split(order[np.argsort(row_of, kind="stable")], ends[:-1])
    return rows if rng is None else [rows[place] for place in rng.permutation(len(rows))]


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
    """Return the rows of each batch of an epoch: arrays of the numbers of their pairs.

    Args:
        lengths, capacity: as of `packed_rows`.
        batch_rows: number of rows of a global batch.
        shuffle, drop_remainder, seed, epoch: as of `plan_batches`.
    """
    rng = np.random.default_rng([seed, epoch]) if shuffle else None
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    rows = packed_rows(lengths, order, capacity, rng)
    batches = [rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows)]
    return batches[:-1] if drop_remainder and len(batches[-1]) < batch_rows else batches
