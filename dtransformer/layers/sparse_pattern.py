"""Pattern of fixed sparse attention, the keys of each query: a plan, computed without devices."""

import dataclasses

import numpy as np

from dtransformer.layers.base import check_size

# Blocks of a local window.
NUM_LOCAL_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class FixedSparsePattern:
    """The fixed pattern: a query sees its own window, and a part of each window before.

    A window has four blocks. A query sees no later position; of its own window it sees all others,
    and of each window before it the global positions: those at the end of one block, which is the
    last block for the first of the patterns, the one before for the second, and so on.

    Reference: Child et al., 2019, "Generating long sequences with sparse transformers", arXiv
    1904.10509, §4.3, whose stride l is 4 · block_size, and whose c is `global_size`.

    Args:
        seq_length: number s of positions.
        block_size: positions of a block; four times as many divide s.
        num_patterns: number of patterns, up to 4.
        global_size: how many positions of a block are global, the last ones; all by default.

    Raises:
        ValueError: a window does not divide the sequence, or there are no such patterns.

    Example:

    >>> print(FixedSparsePattern(16, 2, num_patterns=2).picture(1))
    ■ . . . . . . .
    ■ ■ . . . . . .
    ■ ■ ■ . . . . .
    ■ ■ ■ ■ . . . .
    . . □ . ■ . . .
    . . □ . ■ ■ . .
    . . □ . ■ ■ ■ .
    . . □ . ■ ■ ■ ■
    """

    seq_length: int
    block_size: int
    num_patterns: int = NUM_LOCAL_BLOCKS
    global_size: int | None = None

    def __post_init__(self):
        for name in ("seq_length", "block_size", "num_patterns"):
            check_size(name, getattr(self, name))
        if self.seq_length % self.window:
            raise ValueError(
                f"a window of {NUM_LOCAL_BLOCKS} · block_size={self.window} positions must divide "
                f"seq_length={self.seq_length}"
            )
        if self.num_patterns > NUM_LOCAL_BLOCKS:
            raise ValueError(
                f"there are at most {NUM_LOCAL_BLOCKS} patterns, one for each block of a window, "
                f"got {self.num_patterns}"
            )
        if self.global_size is None:
            object.__setattr__(self, "global_size", self.block_size)
        if check_size("global_size", self.global_size) > self.block_size:
            raise ValueError(
                f"global_size={self.global_size} must be at most block_size={self.block_size}"
            )

    @property
    def window(self) -> int:
        """The number of positions of a window."""
        return NUM_LOCAL_BLOCKS * self.block_size

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return self.seq_length // self.window

    def global_block(self, pattern: int) -> int:
        """Return which block of a window, from 0, has the global positions of a pattern."""
        return NUM_LOCAL_BLOCKS - 1 - pattern % self.num_patterns

    @property
    def num_seen(self) -> int:
        """How many pairs of a query and a key of one head are seen: s · (l + 1 + c · (s/l - 1)) / 2."""
        own = self.num_windows * self.window * (self.window + 1) // 2
        before = self.num_windows * (self.num_windows - 1) // 2
        return own + before * self.window * self.global_size

    def mask(self, pattern: int) -> np.ndarray:
        """Return what is seen of a pattern, bool [s, s]: queries, keys."""
        positions = np.arange(self.seq_length)
        windows, places = divmod(positions, self.window)
        end = (self.global_block(pattern) + 1) * self.block_size
        is_global = (places >= end - self.global_size) & (places < end)
        own = windows[:, None] == windows[None, :]
        before = windows[:, None] > windows[None, :]
        return own & (positions[:, None] >= positions[None, :]) | before & is_global[None, :]

    def picture(self, pattern: int = 0) -> str:
        """Return a pattern as text, by blocks: ■ for own windows, □ for global ones, . for none."""
        size = self.block_size
        seen = self.mask(pattern).reshape(len(self) // size, size, len(self) // size, size)
        seen = seen.any((1, 3))
        lines = []
        for row, columns in enumerate(seen):
            marks = [
                "." if not is_seen else "■" if row // 4 == column // 4 else "□"
                for column, is_seen in enumerate(columns)
            ]
            lines.append(" ".join(marks))
        return "\n".join(lines)

    def __len__(self):
        return self.seq_length

    def __str__(self):
        return "\n\n".join(self.picture(pattern) for pattern in range(self.num_patterns))
