"""Dropout masks of attention probabilities, drawn in tiles of fixed positions.

Implementations of attention compute different blocks of the probabilities, and with sharded sequences
each device has some of them. A tile has the same random numbers for all of them.
"""

import tensorflow as tf

from dtransformer.layers.dropout import DropoutMasks
from dtransformer.parallel.context_parallel.plan import Range

TILE = (512, 1024)
"""Maximum numbers of queries and keys of a tile."""


class AttentionDropout:
    """Dropout mask of all probabilities of an attention. Each tile is drawn when it is first used.

    Args:
        masks: `DropoutMasks`.
        shape: List `[b, n, s, t]`, the shape of the probabilities. Integers, or scalar tensors if
            unknown.
    """

    def __init__(self, masks: DropoutMasks, shape: list):
        self._masks = masks
        self._shape = shape
        self._tiles = {}

    def all(self) -> tf.Tensor:
        """Return the bool mask `[b, n, s, t]` of all probabilities."""
        _, _, s, t = self._shape
        if tf.is_tensor(s) or tf.is_tensor(t):
            return self._masks.draw_mask(self._shape)
        return self.block((0, s), (0, t))

    def block(self, queries: Range, keys: Range) -> tf.Tensor:
        """Return the bool mask `[b, n, queries, keys]` of a block of positions.

        Args:
            queries: Range of the positions of queries.
            keys: Range of the positions of keys.
        """
        rows = []
        for i, query_slice in _overlaps(queries, TILE[0]):
            tiles = [
                self._tile(i, j)[:, :, query_slice, key_slice]
                for j, key_slice in _overlaps(keys, TILE[1])
            ]
            rows.append(tf.concat(tiles, axis=3))
        return tf.concat(rows, axis=2)

    def _tile(self, i, j):
        if (i, j) not in self._tiles:
            b, n, s, t = self._shape
            num_queries = min(TILE[0], s - i * TILE[0])
            num_keys = min(TILE[1], t - j * TILE[1])
            tiles_per_row = -(-t // TILE[1])
            part = i * tiles_per_row + j
            self._tiles[i, j] = self._masks.draw_mask([b, n, num_queries, num_keys], part)
        return self._tiles[i, j]


def _overlaps(positions, size):
    """Yield the index of each tile that overlaps a range, and its slice inside of the tile."""
    start, end = positions
    for index in range(start // size, -(-end // size)):
        first = index * size
        yield index, slice(max(start - first, 0), min(end - first, size))
