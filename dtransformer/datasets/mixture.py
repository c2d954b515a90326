"""Dataset mixing: interleave sources so that every prefix matches the mixing weights.

Also a random permutation that is computed per index, without storing it.

Reference:
    Tijdeman, 1980, "The chairman assignment problem", Discrete Mathematics 32: for sources with
    fractions w there is an order whose first n records contain each source w·n times, with an
    error of less than one record.
"""

import fractions
import math
from collections.abc import Sequence

import numpy as np

from dtransformer.errors import InputError

_ROUNDS = 6
_MAX_PERIOD = 10**6


def permuted(indices: np.ndarray, size: int, seed: Sequence[int]) -> np.ndarray:
    """Apply a random permutation of 0 … size − 1 to indices, without storing the permutation.

    It is a Feistel network over the smallest power of four that is at least `size`. Values outside
    of the range pass through it again (cycle walking). With the four rounds of TensorFlow's
    `index_shuffle` the orders of two epochs correlate; with six rounds they do not.

    Reference: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

    Args:
        indices: int [n], below `size`.
        size: Integer. Number of indices to permute.
        seed: List of nonnegative integers, such as a seed and an epoch.

    Returns:
        int64 [n].

    Example:

    >>> permuted(np.arange(6), 6, seed=[0, 1]).tolist()
    [2, 3, 5, 0, 4, 1]
    """
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    images = np.array(indices, np.uint64)
    outside = np.arange(images.size)
    while outside.size:
        images[outside] = _feistel(images[outside], np.uint64(half), keys)
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _feistel(x, half, keys):
    """Permute 0 … 4^half − 1, uint64 [n]."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = x >> half
    right = x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return left << half | right


def _mixed(x):
    """Return a hash of each element: two products modulo 2^64, so each bit depends on many bits."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ x >> np.uint64(32)


def mixture_order(sizes: Sequence[int], weights: Sequence[float], mode: str = "once") -> np.ndarray:
    """Return the source index of each record of an epoch, int32 [n].

    Each position goes to the source whose next record is due first, among the sources that are
    behind their fraction.

    Args:
        sizes: List with the number of records of each source, at least 1.
        weights: List with the positive weight of each source. Fractions are weights divided by
            their sum.
        mode: End of an epoch. `"once"` (default): each record is used once, and the fraction of an
            exhausted source is distributed over the others. `"repeat"`: until all records have been
            used, while shorter sources are repeated. `"first_ends"`: until the first source is
            exhausted.

    Example:

    >>> mixture_order([100, 100], [0.75, 0.25], "first_ends")[:8].tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    """
    shares = np.array(weights, np.float64) / np.sum(weights)
    sizes = np.array(sizes, np.int64)
    if mode != "once":
        ends = sizes / shares
        num_records = math.ceil(ends.max()) if mode == "repeat" else max(int(ends.min()), 1)
        return _balanced(shares.tolist(), num_records)
    order = []
    left = sizes.copy()
    sources = np.arange(len(sizes))
    while len(sources):
        source_shares = shares[sources] / shares[sources].sum()
        num_records = max(int((left[sources] / source_shares).min()), 1)
        part = sources[_balanced(source_shares.tolist(), num_records)]
        counts = np.bincount(part, minlength=len(sizes))
        if (counts > left).any():  # A source may come one position early, when it is exhausted.
            turns = np.zeros(len(part), np.int64)
            for x in sources:
                turns[part == x] = np.arange(counts[x])
            part = part[turns < left[part]]
            counts = np.bincount(part, minlength=len(sizes))
        order.append(part)
        left -= counts
        sources = sources[left[sources] > 0]
    return np.concatenate(order).astype(np.int32)


def _balanced(weights, num_records, total=1):
    """Return the source index of `num_records` records, by earliest deadline; int64 [num_records].

    Weights are fractions, or integers with the sum `total`, whose order is exact.
    """
    counts = [0] * len(weights)
    order = np.zeros(num_records, np.int64)
    sources = range(len(weights))
    for position in range(num_records):
        # A source may come if it has fewer records than its fraction of the first place + 1.
        ready = [j for j in sources if counts[j] * total < weights[j] * (position + 1)]
        chosen = min(ready or sources, key=lambda j: ((counts[j] + 1) / weights[j], j))
        counts[chosen] += 1
        order[position] = chosen
    return order


class MixtureOrder:
    """Endless order of sources. Every prefix matches the weights with an error below one row.

    Weights are exact decimal numbers: 0.1 is one tenth. So the order repeats, at the latest after
    the sum of the weights in units of their last digit.

    Args:
        weights: List with the positive weight of each source.

    Raises:
        InputError: If the order repeats after more than a million rows.

    Example:

    >>> order = MixtureOrder([0.75, 0.25])
    >>> [order.place(row) for row in range(5)]
    [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]):
        exact = [fractions.Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        period = math.lcm(*(share.denominator for share in shares))
        if period > _MAX_PERIOD:
            raise InputError(
                f"The order of the weights {list(weights)} repeats only after {period:,} rows. Round "
                "the weights to fewer digits, such as 0.333."
            )
        self._order = _balanced([int(share * period) for share in shares], period, period)
        is_source = self._order[:, None] == np.arange(len(weights))
        self._counts = np.cumsum(np.pad(is_source, ((1, 0), (0, 0))), axis=0)

    def counts(self, num_rows: int) -> np.ndarray:
        """Return the number of rows of each source in the first `num_rows` rows, int64 [sources]."""
        periods, rest = divmod(num_rows, len(self._order))
        return periods * self._counts[-1] + self._counts[rest]

    def place(self, row: int) -> tuple[int, int]:
        """Return the source of a row and the number of earlier rows of this source."""
        source = int(self._order[row % len(self._order)])
        return source, int(self.counts(row)[source])


def mixed_records(
    order: np.ndarray, sizes: Sequence[int], seed: Sequence[int], shuffle: bool = True
) -> np.ndarray:
    """Return the record index at each position of a mixture, int64 [n].

    Records are counted over all sources: the first record of a source follows the last record of
    the source before.

    Args:
        order: int [n], source indices from `mixture_order`.
        sizes: List with the number of records of each source.
        seed: List of nonnegative integers, such as a seed and an epoch.
        shuffle: Boolean. Whether to shuffle each source, differently in each repetition. Defaults
            to `True`.

    Example:

    >>> mixed_records(np.array([0, 1, 0, 0]), [2, 5], [0, 0], shuffle=False).tolist()
    [0, 2, 1, 0]
    """
    records = np.zeros(len(order), np.int64)
    first_records = np.cumsum([0, *sizes])
    for source, size in enumerate(sizes):
        places = np.flatnonzero(order == source)
        turns = np.arange(len(places))
        within = turns % size
        if shuffle:
            rounds = [
                permuted(np.arange(size), size, [*seed, source, repetition])
                for repetition in range(-(-len(places) // size))
            ]
            within = np.concatenate([np.zeros(0, np.int64), *rounds])[: len(places)]
        records[places] = first_records[source] + within
    return records
