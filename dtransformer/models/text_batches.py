"""Texts that are computed together."""

from collections.abc import Iterator, Sequence

import numpy as np


def batches_by_length(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of rows that go together: of about the same length, for little padding.

    Args:
        rows: the ids of texts; those without any are left out.
        batch_size: most rows of a batch.
    """
    by_length = sorted(
        (number for number, row in enumerate(rows) if len(row)),
        key=lambda number: len(rows[number]),
    )
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> np.ndarray:
    """Return the ids of texts as an int32 array [b, s], padded at the end."""
    batch = np.full((len(rows), max(map(len, rows))), pad_id, "int32")
    for row, ids in zip(batch, rows, strict=True):
        row[: len(ids)] = ids
    return batch


def as_lists(ids) -> list[list[int]]:
    """Return what a tokenizer's `encode` gives, lists or a ragged tensor, as lists."""
    return ids.to_list() if hasattr(ids, "to_list") else [list(row) for row in ids]
