"""Plans of the batches of an epoch: pure functions of lengths, seed and epoch.

A plan is a list of arrays of sentence indices. Every rank computes the same plan and takes its rows
of each global batch, so several ranks together see the same batches as a single process.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dtransformer.errors import InputError, check_int


@dataclasses.dataclass(frozen=True)
class LengthBuckets:
    """Length buckets of sentences, and the padded lengths of their batches.

    Args:
        bounds: Integer, number of length buckets (1 disables bucketing), or an increasing list of
            the maximum length of each bucket, including the start or end token. Defaults to 8.
        pad_to_bounds: Boolean. Whether to pad a batch to the maximum length of its bucket. This
            limits the number of shapes to one per bucket, plus the remainder. Defaults to `False`,
            which pads to the longest sentence.
        pad_to_multiple_of: Integer. Lengths are padded to a multiple of it, so that a compiler that
            specializes on shapes sees fewer of them. Defaults to 1.

    Raises:
        InputError: If `pad_to_multiple_of` is not a positive integer.
    """

    bounds: int | Sequence[int] = 8
    pad_to_bounds: bool = False
    pad_to_multiple_of: int = 1

    def __post_init__(self):
        check_int("pad_to_multiple_of", self.pad_to_multiple_of)


def plan_batches(
    lengths: np.ndarray | Sequence[int],
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    buckets: int | Sequence[int] = 8,
    min_rows: int = 1,
    shuffle: bool = True,
    drop_remainder: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> list[np.ndarray]:
    """Assign the sentences of an epoch to batches.

    Sentences of similar length share a batch. The remainder of a bucket moves to the next longer
    bucket. The remainder of the longest bucket becomes the last batch. If it is less than half a
    batch, it is divided evenly with the batch before. All batches are therefore close to full, and
    the number of batches depends only on the lengths, not on the seed or the epoch.

    Args:
        lengths: int [N], the length in tokens of the longer side of every pair.
        batch_size: Integer. Number of sentences of a batch. Specify either `batch_size` or
            `batch_tokens`.
        batch_tokens: Integer. Maximum number of tokens of one side of a batch, including padding:
            number of sentences times the maximum length of their bucket.
        buckets: Integer, number of length buckets (1 disables bucketing), or an increasing list of
            the maximum length of each bucket. Defaults to 8.
        min_rows: Integer. Minimum number of sentences of a batch, which is the number of ranks that
            share it. It changes the plan only if a batch has fewer than twice this number. A
            smaller remainder is left out. Defaults to 1.
        shuffle: Boolean. Whether to shuffle sentences within buckets, and the order of batches.
            Defaults to `True`.
        drop_remainder: Boolean. Whether to leave out sentences that do not fill a batch. Defaults
            to `False`.
        seed, epoch: Integers that determine the shuffling.

    Returns:
        List of int64 arrays of indices. Every sentence is in exactly one of them, except for those
        that `drop_remainder` and `min_rows` leave out.

    Raises:
        InputError: If not exactly one of `batch_size` and `batch_tokens` is specified, if it is too
            small for the longest bucket, or if a length is beyond the last bucket.

    Example:

    >>> plan = plan_batches([3, 9, 4, 8], batch_size=2, buckets=[4, 9], shuffle=False)
    >>> [batch.tolist() for batch in plan]
    [[0, 2], [1, 3]]
    """
    lengths = np.asarray(lengths)
    bounds = bucket_bounds(lengths, buckets)
    sizes = _rows_per_batch(bounds, batch_size, batch_tokens, min_rows)
    rng = np.random.default_rng([seed, epoch])
    bucket_ids = np.searchsorted(bounds, lengths)
    batches = []
    remainder = np.zeros(0, np.int64)
    for bucket, size in enumerate(sizes):
        members = np.flatnonzero(bucket_ids == bucket)
        if shuffle:
            members = rng.permutation(members)
        members = np.concatenate([remainder, members])
        end = len(members) - len(members) % size
        batches += np.split(members[:end], end // size) if end else []
        remainder = members[end:]
    if len(remainder) and not drop_remainder:
        batches += _share_remainder(batches, remainder, sizes[-1], min_rows)
    if shuffle:
        batches = [batches[i] for i in rng.permutation(len(batches))]
    return batches


def length_buckets(lengths: np.ndarray | Sequence[int], num_buckets: int) -> np.ndarray:
    """Return the maximum length of each bucket: quantiles of the lengths.

    Args:
        lengths: int [N].
        num_buckets: Integer. Maximum number of buckets. Equal quantiles are merged.

    Returns:
        An increasing int array. The last element is the maximum of `lengths`.

    Example:

    >>> length_buckets([1, 2, 3, 4, 5, 6], 3).tolist()
    [3, 5, 6]
    """
    quantiles = np.linspace(0, 1, num_buckets + 1)[1:]
    return np.unique(np.quantile(lengths, quantiles, method="higher"))


def bucket_bounds(lengths: np.ndarray, buckets: int | Sequence[int]) -> np.ndarray:
    """Return the maximum length of each bucket, an increasing int array.

    Args:
        lengths: int [N].
        buckets: Integer, maximum number of buckets, or an increasing list of maximum lengths.

    Raises:
        InputError: If there is no bucket, the list does not increase, or a length is beyond the
            last bucket.
    """
    if not len(lengths):
        return np.zeros(0, np.int64)
    if np.ndim(buckets) == 0:
        if buckets < 1:
            raise InputError(f"`{buckets=}` must be at least 1, which disables bucketing.")
        return length_buckets(lengths, int(buckets))
    bounds = np.asarray(buckets)
    if not len(bounds) or (np.diff(bounds) <= 0).any():
        raise InputError(f"`{buckets=}` must be a list of increasing lengths.")
    if bounds[-1] < lengths.max():
        raise InputError(
            f"A sentence has {lengths.max()} tokens, but the last bucket ends at {bounds[-1]}. Add a "
            "bucket or lower `max_length`."
        )
    return bounds


def check_one_size(batch_size: int | None, batch_tokens: int | None) -> None:
    """Check that exactly one of `batch_size` and `batch_tokens` is specified.

    Raises:
        InputError: If both or neither are specified.
    """
    if (batch_size is None) == (batch_tokens is None):
        raise InputError(
            f"Specify either `batch_size` or `batch_tokens`, got {batch_size=} and {batch_tokens=}."
        )


def check_rows(rows: int, num_shards: int, description: str) -> None:
    """Check that a batch has at least one row for each data rank.

    Args:
        rows: Integer. Number of rows of a global batch.
        num_shards: Integer. Number of data ranks.
        description: Description of the batch size, the beginning of the error message.

    Raises:
        InputError: If `rows` is less than `num_shards`.
    """
    if rows < num_shards:
        raise InputError(
            f"{description} is less than the {num_shards} data ranks that share a batch. Use at least "
            f"{num_shards} rows."
        )


def _rows_per_batch(bounds, batch_size, batch_tokens, min_rows):
    """Return a list with the number of sentences of a batch of each bucket."""
    check_one_size(batch_size, batch_tokens)
    if batch_size is not None:
        check_rows(batch_size, min_rows, f"`{batch_size=}`")
        return [int(batch_size)] * len(bounds)
    if len(bounds) and batch_tokens < min_rows * bounds[-1]:
        raise InputError(
            f"`{batch_tokens=}` has no room for {min_rows} sentences of {bounds[-1]} tokens, one for "
            f"each data rank. Set it to at least {min_rows * bounds[-1]} or lower `max_length`."
        )
    return [int(batch_tokens // bound) for bound in bounds]


def _share_remainder(batches, remainder, size, min_rows):
    """Return the batches of the remainder. It may be divided evenly with the last batch.

    In that case the last batch is removed from `batches`.
    """
    # Small batches are noisy, and a batch smaller than the number of ranks cannot be divided.
    # With even parts, the plan is the same for every common number of ranks.
    if len(remainder) < size / 2 and batches:
        combined = np.concatenate([batches[-1], remainder])
        parts = np.array_split(combined, -(-len(combined) // size))
        if len(parts[-1]) >= min_rows:
            batches.pop()
            return parts
    return [remainder] if len(remainder) >= min_rows else []
