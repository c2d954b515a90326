"""Mixtures: which source each record of an epoch is of, in exact shares at every prefix.

Reference: Tijdeman, 1980, "The chairman assignment problem", Discrete Mathematics 32: of sources with
shares w some order has, of the first n records, less than one more or fewer than w·n of each.
"""

import math
from collections.abc import Sequence

import numpy as np

# A shuffle that needs no memory: where each index goes is computed when it is asked for.


_ROUNDS = 6


def permuted(indices: np.ndarray, size: int, seed: Sequence[int]) -> np.ndarray:
    """Return the images of indices under a random permutation of 0 … size − 1.

    A Feistel network over the least power of four that holds `size`; what leaves the range goes
    through it again (cycle walking). With TensorFlow's `index_shuffle` of four rounds, orders of
    two epochs correlate; with six of these they do not.

    Reference: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

    Args:
        indices: int [n], below `size`.
        size: number of indices that there are.
        seed: not negative ints, such as a seed and an epoch.

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
    """Return the image of each of 0 … 4^half − 1, uint64 [n]."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return left << half | right


def _mixed(x):
    """Return 64 bits that each depend on many of the given ones, by two products modulo 2^64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ x >> np.uint64(32)


def mixture_order(sizes: Sequence[int], weights: Sequence[float], mode: str = "once") -> np.ndarray:
    """Return the number of the source of each record of an epoch, int32 [n].

    Of the sources that take a turn, the one takes it whose next record is due first.

    Args:
        sizes: numbers of records of the sources, at least 1.
        weights: their weights, more than 0; shares are these, divided by their sum.
        mode: `"once"`: each record comes once, and a source that has ended leaves its share to the
            others; `"repeat"`: until each record has come, others again; `"first_ends"`: until a
            source has ended.

    Example:

    >>> mixture_order([100, 100], [0.75, 0.25], "first_ends")[:8].tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    """
    shares = np.array(weights, np.float64) / np.sum(weights)
    sizes = np.array(sizes, np.int64)
    if mode != "once":
        ends = sizes / shares
        number = math.ceil(ends.max()) if mode == "repeat" else max(int(ends.min()), 1)
        return _balanced(shares, number)
    order, left, alive = [], sizes.copy(), np.arange(len(sizes))
    while len(alive):
        own = shares[alive] / shares[alive].sum()
        number = max(int((left[alive] / own).min()), 1)
        part = alive[_balanced(own, number)]
        counts = np.bincount(part, minlength=len(sizes))
        if (counts > left).any():  # the last record of a source came before its turn
            turns = np.zeros(len(part), np.int64)
            for x in alive:
                turns[part == x] = np.arange(counts[x])
            part = part[turns < left[part]]
            counts = np.bincount(part, minlength=len(sizes))
        order.append(part)
        left -= counts
        alive = alive[left[alive] > 0]
    return np.concatenate(order).astype(np.int32)


def _balanced(shares, number):
    """Return the source of each of a number of records, by earliest deadline; int [number]."""
    shares = shares.tolist()
    counts, order = [0] * len(shares), np.zeros(number, np.int64)
    sources = range(len(shares))
    for place in range(number):
        # Those may come whose share of the records so far, this one included, is not there yet.
        ready = [j for j in sources if counts[j] < shares[j] * (place + 1)]
        chosen = min(ready or sources, key=lambda j: ((counts[j] + 1) / shares[j], j))
        counts[chosen] += 1
        order[place] = chosen
    return order


def mixed_records(
    order: np.ndarray, sizes: Sequence[int], seed: Sequence[int], shuffle: bool = True
) -> np.ndarray:
    """Return the number of the record of each place of an order, int64 [n], counted over all sources.

    Args:
        order: as of `mixture_order`.
        sizes: numbers of records of the sources.
        seed: not negative ints, such as a seed and an epoch.
        shuffle: whether each source is shuffled; anew each time that it is gone through.

    Example:

    >>> mixed_records(np.array([0, 1, 0, 0]), [2, 5], [0, 0], shuffle=False).tolist()
    [0, 2, 1, 0]
    """
    found, first = np.zeros(len(order), np.int64), np.cumsum([0, *sizes])
    for source, size in enumerate(sizes):
        places = np.flatnonzero(order == source)
        turns = np.arange(len(places))
        within = turns % size
        if shuffle:
            rounds = [
                permuted(np.arange(size), size, [*seed, source, number])
                for number in range(-(-len(places) // size))
            ]
            within = np.concatenate([np.zeros(0, np.int64), *rounds])[: len(places)]
        found[places] = first[source] + within
    return found
