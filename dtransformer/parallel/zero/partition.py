"""Which ranks of the data group update which entries of a weight: the plan, and its table.

Each weight is flattened, padded and cut into one slice a rank (`parallel.slices`). Small
weights, and those that the config excludes, stay whole.

Reference: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054.
"""

import dataclasses
import math

from dtransformer.parallel.collectives import flat_shards
from dtransformer.tables import columns

LEVELS = ("nothing", "optimizer states", "states and gradients", "states, gradients and weights")


@dataclasses.dataclass(frozen=True)
class ParameterPartition:
    """One weight of the plan.

    Args:
        path: its path in the network.
        shape: shape of this rank's part of it, which is the whole without model
            parallelism.
        item_bytes: bytes of an entry.
        num_slices: number of slices that the part is cut into; 1 where it stays whole.
        why: why it stays whole; "" where it is cut.
    """

    path: str
    shape: tuple
    item_bytes: int
    num_slices: int
    why: str = ""

    @property
    def entries(self):
        """The number of entries of the part."""
        return math.prod(self.shape)

    @property
    def slice_entries(self):
        """The number of entries that each rank updates, padding included."""
        return flat_shards.shard_size(self.entries, self.num_slices)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the work of the optimizer is divided over the data group. Its `str` is a table.

    Args:
        level: 0 to 3, as `TransformerOpParallelConfig.optimizer_shard`.
        num_slices: number of ranks of the data group.
        rows: tuple of `ShardRow`s.
    """

    level: int
    num_slices: int
    rows: tuple

    @classmethod
    def of(cls, weights, config, num_slices):
        """Return the plan of a list of weights.

        Args:
            weights: list of (path, shape, bytes of an entry, whether it has a constraint).
            config: a `TransformerOpParallelConfig`.
            num_slices: number of ranks of the data group.
        """
        level = int(config.optimizer_shard) if num_slices > 1 else 0
        rows = []
        for path, shape, item_bytes, has_constraint in weights:
            why = "not asked for" if num_slices > 1 else "one rank"
            if level:
                why = config.why_whole(path, shape, item_bytes, has_constraint)
            rows.append(
                ParameterPartition(path, tuple(shape), item_bytes, 1 if why else num_slices, why)
            )
        return cls(level, num_slices, tuple(rows))

    @property
    def entries(self):
        """The number of entries of all weights on this rank."""
        return sum(row.entries for row in self.rows)

    @property
    def slice_entries(self):
        """The number of entries that each rank updates, padding included."""
        return sum(row.slice_entries for row in self.rows)

    def __str__(self):
        header = ("weight", "shape", "slices", "entries updated by a rank", "whole because")
        lines = [header]
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            lines.append((row.path, shape, str(row.num_slices), f"{row.slice_entries:,}", row.why))
        text = columns(lines, right=(2, 3))
        text.append(text[1])
        text.append(
            f"Optimizer sharding, level {self.level}: {LEVELS[self.level]} are cut over "
            f"{self.num_slices} ranks; of {self.entries:,} entries each updates "
            f"{self.slice_entries:,}"
        )
        return "\n".join(text)
