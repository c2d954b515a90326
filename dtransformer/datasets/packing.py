"""Packing: sentences one after the other in rows of one length, so that nothing is padded.

Which sentences share a row is best-fit decreasing bin packing (Johnson et al., 1974, "Worst-case
performance bounds for simple one-dimensional packing algorithms"), here of two sides at once.
"""

import numpy as np

from dtransformer.datasets.batch_plan import check_one_size
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
    if rows < num_shards:
        given = f"batch_size={batch_size}" if batch_tokens is None else f"{batch_tokens=}"
        raise InputError(
            f"{given} is {rows} rows of packed_length={packed_length}, for {num_shards} data "
            "ranks: give at least one row for each"
        )
    return rows


class PackedPlan:
    """Which sentence pairs make up the rows of each batch.

    Rows are made of the same lengths in each epoch, of which sentences differ: so the number of
    batches depends on the lengths only.

    Args:
        lengths: int [N, 2], tokens of both sides.
        capacity: number of tokens of a row on each side.
        batch_rows: number of rows of a global batch.
        shuffle, drop_remainder, seed: as of `plan_batches`.
    """

    def __init__(self, lengths, capacity, batch_rows, shuffle=True, drop_remainder=False, seed=0):
        self._keys = -lengths[:, 1], -lengths[:, 0], -lengths.max(axis=1)
        self._shuffle, self._seed = shuffle, seed
        row_of = pack(lengths[np.lexsort(self._keys)], capacity)
        self._by_row = np.argsort(row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(row_of))
        self._batch_rows, number = batch_rows, len(self._ends)
        self.num_batches = number // batch_rows if drop_remainder else -(-number // batch_rows)

    def batches(self, epoch: int) -> list[list[np.ndarray]]:
        """Return the rows of each batch of an epoch: arrays of the numbers of their pairs."""
        rng = np.random.default_rng([self._seed, epoch])
        number = len(self._by_row)
        # Pairs of the same lengths stand for each other.
        ties = rng.random(number) if self._shuffle else np.arange(number)
        order = np.lexsort((ties, *self._keys))
        rows = np.split(order[self._by_row], self._ends[:-1])
        if self._shuffle:
            rows = [rows[i] for i in rng.permutation(len(rows))]
        size = self._batch_rows
        return [rows[i * size : (i + 1) * size] for i in range(self.num_batches)]
