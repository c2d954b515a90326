"""Partition of the optimizer update over the data-parallel group.

`"flat"` flattens, pads and divides each weight into one shard per rank. `"whole"` assigns each
weight to one rank, so that every optimizer works. It assigns weights in order of size to the rank
with the least work. Small and excluded weights are replicated.

Reference:
    [Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)
"""

import dataclasses
import math
from collections.abc import Sequence

from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.tables import columns

_SHARDED = (
    "nothing",
    "optimizer states",
    "states and gradients",
    "states, gradients and weights",
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A trainable weight, or a shard of one, that a rank stores.

    Args:
        path: Path of the weight in the network.
        shape: Shape of the local model-parallel shard. Without model parallelism, the full shape.
        item_bytes: Bytes per element.
        has_constraint: Boolean. Whether Keras projects the weight after every update.
        updates: Integer. Number of updated elements if the update unshards the weight over the
            mesh: the full weight for its first shard, 0 for the others. `None` means `shape`.
        division: `Division` over the data-parallel group, or `None` for a replicated weight.
            `Partition.from_weights` sets it.
        why_replicated: String. Reason why the weight is replicated, or `""` if it is sharded.
            `Partition.from_weights` sets it.
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
        """Number of elements of `shape`."""
        return math.prod(self.shape)

    @property
    def updated_bytes(self) -> int:
        """Bytes of the updated elements."""
        elements = self.num_elements if self.updates is None else self.updates
        return elements * self.item_bytes

    @property
    def num_shards(self) -> int:
        """Number of different shards in the group, or 1 for a replicated weight."""
        return 1 if self.division is None else sum(map(bool, self.division.sizes))

    def shard_elements(self, index: int) -> int:
        """Return the number of elements of a rank's shard, including padding."""
        return self.num_elements if self.division is None else self.division.sizes[index]

    def updated_elements(self, index: int) -> int:
        """Return the number of elements that a rank updates, including padding."""
        elements = self.shard_elements(index)
        if self.updates is None or not elements:
            return elements
        return self.updates

    def describe_owners(self, num_ranks: int) -> str:
        """Return a text for the table with the ranks that update the weight."""
        if self.division is None:
            return f"each of {num_ranks}"
        owners = [index for index, size in enumerate(self.division.sizes) if size]
        return f"rank {owners[0]}" if len(owners) == 1 else f"a part each of {len(owners)}"


@dataclasses.dataclass(frozen=True)
class Partition:
    """Plan of the optimizer update over the data-parallel group. `str()` returns a table.

    Args:
        level: Integer, 0 to 3; see `TransformerOpParallelConfig.optimizer_shard`.
        kind: `"flat"` or `"whole"`; see `optimizer_shard_partition`.
        num_shards: Integer. Number of ranks in the data-parallel group.
        parameters: Tuple of `Parameter`s with divisions.
        index: Integer. Position of this rank in the group. Defaults to `0`.
    """

    level: int
    kind: str
    num_shards: int
    parameters: tuple[Parameter, ...]
    index: int = 0

    @classmethod
    def from_weights(
        cls,
        weights: Sequence[Parameter],
        config: TransformerOpParallelConfig,
        num_shards: int,
        index: int = 0,
    ) -> "Partition":
        """Return the partition of a list of weights.

        Args:
            weights: List of `Parameter`s without divisions.
            config: `TransformerOpParallelConfig`.
            num_shards: Integer. Number of ranks in the data-parallel group.
            index: Integer. Position of this rank in the group. Defaults to `0`.
        """
        level = int(config.optimizer_shard) if num_shards > 1 else 0
        kind = config.optimizer_shard_partition
        reasons = _replication_reasons(weights, config, num_shards)
        owners = assign_owners([w for w, reason in zip(weights, reasons) if not reason], num_shards)
        parameters = []
        for weight, reason in zip(weights, reasons):
            division = None
            if not reason and kind == "whole":
                division = Division.single_owner(
                    weight.num_elements, num_shards, owners[weight.path]
                )
            elif not reason:
                division = Division.even(weight.num_elements, num_shards)
            parameters.append(dataclasses.replace(weight, division=division, why_replicated=reason))
        return cls(level, kind, num_shards, tuple(parameters), index)

    @property
    def num_elements(self) -> int:
        """Number of elements of all weights on this rank."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def updated_elements(self) -> tuple[int, ...]:
        """Number of elements that each rank of the group updates, including padding."""
        totals = [0] * self.num_shards
        for parameter in self.parameters:
            for index in range(self.num_shards):
                totals[index] += parameter.updated_elements(index)
        return tuple(totals)

    @property
    def balance(self) -> float:
        """Maximum over mean of the bytes that the ranks update."""
        loads = [0] * self.num_shards
        for parameter in self.parameters:
            for index in range(self.num_shards):
                loads[index] += parameter.updated_elements(index) * parameter.item_bytes
        return max(loads) * len(loads) / max(sum(loads), 1)

    def __str__(self):
        lines = [("weight", "shape", "updated by", "elements", "replicated because")]
        for parameter in self.parameters:
            shape = "×".join(map(str, parameter.shape)) or "scalar"
            updated = max(parameter.updated_elements(index) for index in range(self.num_shards))
            owners = parameter.describe_owners(self.num_shards)
            lines.append((parameter.path, shape, owners, f"{updated:,}", parameter.why_replicated))
        text = columns(lines, right=(3,))
        text.append(text[1])
        counts = [f"{count:,}" for count in self.updated_elements]
        work = f"Each rank updates {counts[0]}"
        if self.kind == "whole":
            work = f"The ranks update {', '.join(counts)}; the maximum is {self.balance:.2f} × the mean"
        text.append(
            f"Optimizer sharding, level {self.level}, {self.kind}: {_SHARDED[self.level]} are sharded "
            f"over {self.num_shards} ranks. {work} of {self.num_elements:,} elements."
        )
        return "\n".join(text)


def assign_owners(weights: Sequence[Parameter], num_ranks: int) -> dict[str, int]:
    """Assign each weight to the rank that updates it.

    In order of size, each weight goes to the rank with the fewest bytes so far. The maximum is at
    most 4/3 of the optimum (Graham, 1969). The result is identical on all ranks.

    Args:
        weights: List of `Parameter`s. Parameters of equal paths are shards of one weight and have
            the same owner.
        num_ranks: Integer. Number of ranks.

    Returns:
        A dict from the weights' paths to ranks.

    Example:

    >>> sizes = {"table": 600, "kernel": 400, "bias": 4, "output": 500}
    >>> assign_owners([Parameter(path, (size,), 4) for path, size in sizes.items()], 2)
    {'table': 0, 'output': 1, 'kernel': 1, 'bias': 0}
    """
    sizes = _bytes_by_path(weights)
    loads = [0] * num_ranks
    owners = {}
    for path in sorted(sizes, key=sizes.get, reverse=True):  # Ties keep the order of the weights.
        owners[path] = loads.index(min(loads))
        loads[owners[path]] += sizes[path]
    return owners


def _bytes_by_path(weights):
    sizes = {}
    for weight in weights:
        sizes[weight.path] = sizes.get(weight.path, 0) + weight.updated_bytes
    return sizes


def _replication_reasons(weights, config, num_ranks):
    """Return a list with `Parameter.why_replicated` of each weight."""
    if num_ranks == 1:
        return ["one rank"] * len(weights)
    if not config.optimizer_shard:
        return ["optimizer_shard=0"] * len(weights)
    reasons = [
        config.why_replicated(w.path, w.shape, w.item_bytes, w.has_constraint) for w in weights
    ]
    sizes = _bytes_by_path(weights)
    is_flat = config.optimizer_shard_partition == "flat"
    if is_flat or any(reasons) or not 0 < len(sizes) < num_ranks:
        return reasons
    # Without a replicated weight, a rank would have nothing to update.
    smallest = min(sizes, key=sizes.get)
    return ["fewer weights than ranks" if w.path == smallest else "" for w in weights]
