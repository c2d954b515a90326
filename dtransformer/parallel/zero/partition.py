"""Which ranks of the data-parallel group update which part of a weight: the plan, and its table.

Each weight is flattened, padded and divided into one shard a rank; see
`collectives.flat_shards`. Small weights, and those that the config excludes, are replicated.

Reference: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054.
"""

import dataclasses
import math
from collections.abc import Iterable

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config import TransformerOpParallelConfig
from dtransformer.tables import columns

LEVELS = ("nothing", "optimizer states", "states and gradients", "states, gradients and weights")


@dataclasses.dataclass(frozen=True)
class ParameterPartition:
    """One weight of the plan.

    Args:
        path: its path in the network.
        shape: shape of what this rank's model-parallel shard of it is; the full shape
            without model parallelism.
        item_bytes: bytes of an element.
        num_shards: number of shards over the data-parallel group; 1 where it is replicated.
        why_replicated: why it is replicated; "" where it is sharded.
    """

    path: str
    shape: tuple[int, ...]
    item_bytes: int
    num_shards: int
    why_replicated: str = ""

    @property
    def num_elements(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    @property
    def shard_elements(self) -> int:
        """The number of elements that each rank updates, padding included."""
        return flat_shards.shard_size(self.num_elements, self.num_shards)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the optimizer's work is divided over the data-parallel group. Its `str` is a table.

    Args:
        level: 0 to 3, as `TransformerOpParallelConfig.optimizer_shard`.
        num_shards: number of ranks of the data-parallel group.
        parameters: tuple of `ParameterPartition`s.
    """

    level: int
    num_shards: int
    parameters: tuple[ParameterPartition, ...]

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[str, tuple[int, ...], int, bool]],
        config: TransformerOpParallelConfig,
        num_shards: int,
    ) -> "Partition":
        """Return the plan of a list of weights.

        Args:
            weights: list of (path, shape, bytes of an element, whether it has a constraint).
            config: a `TransformerOpParallelConfig`.
            num_shards: number of ranks of the data-parallel group.
        """
        level = int(config.optimizer_shard) if num_shards > 1 else 0
        parameters = []
        for path, shape, item_bytes, has_constraint in weights:
            why = "not asked for" if num_shards > 1 else "one rank"
            if level:
                why = config.why_replicated(path, shape, item_bytes, has_constraint)
            parameters.append(
                ParameterPartition(path, tuple(shape), item_bytes, 1 if why else num_shards, why)
            )
        return cls(level, num_shards, tuple(parameters))

    @property
    def num_elements(self) -> int:
        """The number of elements of all weights on this rank."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def shard_elements(self) -> int:
        """The number of elements that each rank updates, padding included."""
        return sum(parameter.shard_elements for parameter in self.parameters)

    def __str__(self):
        lines = [("weight", "shape", "shards", "elements updated by a rank", "replicated because")]
        for one in self.parameters:
            shape = "×".join(map(str, one.shape)) or "scalar"
            updated = f"{one.shard_elements:,}"
            lines.append((one.path, shape, str(one.num_shards), updated, one.why_replicated))
        text = columns(lines, right=(2, 3))
        text.append(text[1])
        text.append(
            f"Optimizer sharding, level {self.level}: {LEVELS[self.level]} are sharded over "
            f"{self.num_shards} ranks; of {self.num_elements:,} elements each updates "
            f"{self.shard_elements:,}"
        )
        return "\n".join(text)
