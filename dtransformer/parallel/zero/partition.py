"""Partition of the update over the data-parallel group: the plan, and its table.

There are two kinds. Flat: each weight is flattened, padded and divided into one shard a rank. Whole:
each weight has one rank that updates all of it, so that any optimizer can; weights are given to
ranks one by one, the largest first, each to the rank that has least. Small weights, and those that
the config excludes, are replicated.

Reference: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.tables import columns

LEVELS = ("nothing", "optimizer states", "states and gradients", "states, gradients and weights")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a rank stores of a weight that is trained.

    Args:
        path: its path in the network.
        shape: shape of what this rank's model-parallel shard of it is; the full shape
            without model parallelism.
        item_bytes: bytes of an element.
        has_constraint: whether Keras projects it after every update.
        updates: number of elements that are updated where it is made whole over the mesh for
            that, counted for the first of a weight's shards; None for those of `shape`.
        division: how its elements are divided over the data-parallel group; None where it
            is replicated. The plan's, as is the next one.
        why_replicated: why it is replicated; "" where it is sharded.
    """

    path: str
    shape: tuple[int, ...]
    item_bytes: int
    has_constraint: bool = False
    updates: int | None = None
    division: Division | None = None
    why_replicated: str = ""

    @property
    def num_elements(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    @property
    def updated_bytes(self) -> int:
        """The bytes that are updated together."""
        elements = self.num_elements if self.updates is None else self.updates
        return elements * self.item_bytes

    @property
    def num_shards(self) -> int:
        """The number of ranks that have some of it for themselves; 1 where it is replicated."""
        return 1 if self.division is None else sum(map(bool, self.division.sizes))

    def shard_elements(self, index: int) -> int:
        """The number of elements of the shard of one position, padding included."""
        return self.num_elements if self.division is None else self.division.sizes[index]

    def updated_elements(self, index: int) -> int:
        """The number of elements that one position updates, padding included."""
        elements = self.shard_elements(index)
        return elements if self.updates is None else self.updates * bool(elements)

    def held_by(self, num_ranks: int) -> str:
        """Return who updates it, for the table."""
        if self.division is None:
            return f"each of {num_ranks}"
        owners = [index for index, size in enumerate(self.division.sizes) if size]
        return f"rank {owners[0]}" if len(owners) == 1 else f"a part each of {len(owners)}"


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the optimizer's work is divided over the data-parallel group. Its `str` is a table.

    Args:
        level: 0 to 3, as `TransformerOpParallelConfig.optimizer_shard`.
        kind: `"flat"` or `"whole"`, as `optimizer_shard_partition`.
        num_shards: number of ranks of the data-parallel group.
        parameters: tuple of `Parameter`s, with their divisions.
        index: this rank's position in the group.
    """

    level: int
    kind: str
    num_shards: int
    parameters: tuple[Parameter, ...]
    index: int = 0

    @classmethod
    def of(
        cls,
        weights: Iterable[Parameter],
        config: TransformerOpParallelConfig,
        num_shards: int,
        index: int = 0,
    ) -> "Partition":
        """Return the plan of a list of weights.

        Args:
            weights: list of `Parameter`s.
            config: a `TransformerOpParallelConfig`.
            num_shards: number of ranks of the data-parallel group.
            index: this rank's position in it.
        """
        weights = list(weights)
        level = int(config.optimizer_shard) if num_shards > 1 else 0
        kind = config.optimizer_shard_partition
        whys = ["not asked for" if num_shards > 1 else "one rank"] * len(weights)
        if level:
            whys = [
                config.why_replicated(one.path, one.shape, one.item_bytes, one.has_constraint)
                for one in weights
            ]
        if kind == "whole" and level:
            whys = _with_work_for_all(weights, whys, num_shards)
        owners = owners_of([one for one, why in zip(weights, whys) if not why], num_shards)
        parameters = []
        for one, why in zip(weights, whys):
            division = None
            if not why and kind == "whole":
                division = Division.whole(one.num_elements, num_shards, owners[one.path])
            elif not why:
                division = Division.even(one.num_elements, num_shards)
            parameters.append(dataclasses.replace(one, division=division, why_replicated=why))
        return cls(level, kind, num_shards, tuple(parameters), index)

    @property
    def num_elements(self) -> int:
        """The number of elements of all weights on this rank."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def updated_elements(self) -> tuple[int, ...]:
        """For each position the number of elements that it updates, padding included."""
        return tuple(
            sum(parameter.updated_elements(index) for parameter in self.parameters)
            for index in range(self.num_shards)
        )

    @property
    def balance(self) -> float:
        """The largest number of bytes that a rank updates, over the mean of all ranks."""
        of_each = [
            sum(one.updated_elements(index) * one.item_bytes for one in self.parameters)
            for index in range(self.num_shards)
        ]
        return max(of_each) * len(of_each) / max(sum(of_each), 1)

    def __str__(self):
        lines = [("weight", "shape", "updated by", "elements", "replicated because")]
        for one in self.parameters:
            shape = "×".join(map(str, one.shape)) or "scalar"
            updated = max(one.updated_elements(index) for index in range(self.num_shards))
            who = one.held_by(self.num_shards)
            lines.append((one.path, shape, who, f"{updated:,}", one.why_replicated))
        text = columns(lines, right=(3,))
        text.append(text[1])
        numbers = [f"{number:,}" for number in self.updated_elements]
        each = f"each updates {numbers[0]}"
        if self.kind == "whole":
            each = (
                f"they update {', '.join(numbers)}: the most is {self.balance:.2f} times the mean"
            )
        text.append(
            f"Optimizer sharding, level {self.level}, {self.kind}: {LEVELS[self.level]} are sharded "
            f"over {self.num_shards} ranks; of {self.num_elements:,} elements {each}"
        )
        return "\n".join(text)


def owners_of(weights: Sequence[Parameter], num_ranks: int) -> dict[str, int]:
    """Return which rank updates each weight, by its path: the same on all ranks.

    The largest comes first, and goes to the rank with the fewest bytes so far: no rank then has
    more than 4/3 of the least that is possible (Graham, 1969).

    Args:
        weights: list of `Parameter`s; those of one path, its shards, stay together.
        num_ranks: number of ranks.

    Example:

    >>> sizes = {"table": 600, "kernel": 400, "bias": 4, "output": 500}
    >>> owners_of([Parameter(path, (size,), 4) for path, size in sizes.items()], 2)
    {'table': 0, 'output': 1, 'kernel': 1, 'bias': 0}
    """
    sizes, loads, owners = _bytes_by_path(weights), [0] * num_ranks, {}
    for path in sorted(sizes, key=sizes.get, reverse=True):  # ties in the weights' order
        owners[path] = loads.index(min(loads))
        loads[owners[path]] += sizes[path]
    return owners


def _bytes_by_path(weights):
    sizes = {}
    for one in weights:
        sizes[one.path] = sizes.get(one.path, 0) + one.updated_bytes
    return sizes


def _with_work_for_all(weights, whys, num_ranks):
    """Return why weights are replicated; the smallest one, where a rank would update none."""
    sizes = _bytes_by_path(weights)
    if any(whys) or not 0 < len(sizes) < num_ranks:
        return whys
    smallest = min(sizes, key=sizes.get)
    return ["fewer weights than ranks" if one.path == smallest else "" for one in weights]
