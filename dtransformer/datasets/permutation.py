"""A shuffle that needs no memory: where each index goes is computed when it is asked for."""

from collections.abc import Sequence

import numpy as np

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
