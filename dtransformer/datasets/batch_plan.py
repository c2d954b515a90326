"""Plan of the batches of an epoch: pure functions of lengths, seed and epoch.

A plan is a list of arrays of sentence numbers. Every rank computes the same plan and takes its rows
of each global batch, so that several ranks see the batches that one process sees.
"""

from collections.abc import Sequence

import numpy as np

from dtransformer.errors import InputError


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
    """Plan an epoch: which sentences make up each batch.

    Sentences of about the same length share a batch. What is left over in a bucket moves up to
    the next longer one. What is left over in the longest bucket is the last batch; or, where it is
    less than half a batch, it shares evenly with the batch before. So all batches have about their
    full size, and their number depends on the lengths only, not on the seed or the epoch.

    Args:
        lengths: int [N], the length of the longer side of every pair, in tokens.
        batch_size: number of sentences of a batch; or
        batch_tokens: number of tokens of one side of a batch, padding included: the number of
            its sentences times the greatest length of its bucket stays within it.
        buckets: number of buckets of lengths, 1 for no bucketing; or the greatest length of
            each, rising.
        min_rows: the fewest sentences of a batch: the number of ranks that share it. It changes
            the plan only where a batch has fewer than twice as many sentences; a remainder that
            is too small is then left out.
        shuffle: whether sentences are shuffled within buckets, and batches among each other.
        drop_remainder: whether the remainder that fills no batch is left out.
        seed, epoch: what the shuffling depends on.

    Returns:
        A list of int64 arrays. Every sentence is in exactly one of them, except for those that
        `drop_remainder` and `min_rows` leave out.

    Raises:
        InputError: the size of a batch is given twice or not at all, or is too small for the
            longest bucket; or a length is beyond the last bucket.

    Example:

    >>> plan = plan_batches([3, 9, 4, 8], batch_size=2, buckets=[4, 9], shuffle=False)
    >>> [batch.tolist() for batch in plan]
    [[0, 2], [1, 3]]
    """
    lengths = np.asarray(lengths)
    bounds = bucket_bounds(lengths, buckets)
    sizes = _rows_per_batch(bounds, batch_size, batch_tokens, min_rows)
    rng = np.random.default_rng([seed, epoch])
    bucket_of = np.searchsorted(bounds, lengths)
    batches, remainder = [], np.zeros(0, np.int64)
    for bucket, size in enumerate(sizes):
        members = np.flatnonzero(bucket_of == bucket)
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
    """Return the greatest length of each bucket: quantiles of the lengths.

    Args:
        lengths: int [N].
        num_buckets: the most buckets that there are.

    Returns:
        A rising int array; the last one is the greatest length.

    Example:

    >>> length_buckets([1, 2, 3, 4, 5, 6], 3).tolist()
    [3, 5, 6]
    """
    quantiles = np.linspace(0, 1, num_buckets + 1)[1:]
    return np.unique(np.quantile(lengths, quantiles, method="higher"))


def bucket_bounds(lengths: np.ndarray, buckets: int | Sequence[int]) -> np.ndarray:
    """Return the greatest length of each bucket; arguments as of `plan_batches`.

    Raises:
        InputError: there is no bucket, they do not rise, or a length is beyond the last one.
    """
    if not len(lengths):
        return np.zeros(0, np.int64)
    if np.ndim(buckets) == 0:
        if buckets < 1:
            raise InputError(f"{buckets} buckets are too few: give at least 1, no bucketing")
        return length_buckets(lengths, int(buckets))
    bounds = np.asarray(buckets)
    if not len(bounds) or (np.diff(bounds) <= 0).any():
        raise InputError(f"buckets={buckets}: their greatest lengths have to rise")
    if bounds[-1] < lengths.max():
        raise InputError(
            f"a sentence has {lengths.max()} tokens, the last bucket ends at {bounds[-1]}: "
            "add a bucket, or lower max_length"
        )
    return bounds


def check_one_size(batch_size: int | None, batch_tokens: int | None) -> None:
    """Check that the size of a batch is given once.

    Raises:
        InputError: it is given twice or not at all.
    """
    if (batch_size is None) == (batch_tokens is None):
        raise InputError(
            f"batch_size={batch_size} and batch_tokens={batch_tokens}: give one of the two"
        )


def check_rows(rows: int, num_shards: int, given: str) -> None:
    """Check that a batch has a row for each data rank.

    Raises:
        InputError: it has not; begins with `given`, what its size is.
    """
    if rows < num_shards:
        raise InputError(
            f"{given} is less than the {num_shards} data ranks that share a batch: give at least "
            f"{num_shards}"
        )


def _rows_per_batch(bounds, batch_size, batch_tokens, min_rows):
    """Return how many sentences a batch of each bucket has, a list of int."""
    check_one_size(batch_size, batch_tokens)
    if batch_size is not None:
        check_rows(batch_size, min_rows, f"batch_size={batch_size}")
        return [int(batch_size)] * len(bounds)
    if len(bounds) and batch_tokens < min_rows * bounds[-1]:
        raise InputError(
            f"batch_tokens={batch_tokens} does not hold {min_rows} of the longest sentences, "
            f"{bounds[-1]} tokens each, one for each data rank: give at least "
            f"{min_rows * bounds[-1]}, or lower max_length"
        )
    return [int(batch_tokens // bound) for bound in bounds]


def _share_remainder(batches, remainder, size, min_rows):
    """Return the remainder as batches; takes the last of `batches` back if it shares with it."""
    # Small batches are noisy, and one that is smaller than the number of ranks could not
    # be shared: even shares keep the plan the same for any usual number of ranks.
    if len(remainder) < size / 2 and batches:
        both = np.concatenate([batches[-1], remainder])
        shares = np.array_split(both, -(-len(both) // size))
        if len(shares[-1]) >= min_rows:
            batches.pop()
            return shares
    return [remainder] if len(remainder) >= min_rows else []
