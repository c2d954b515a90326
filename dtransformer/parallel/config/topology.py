"""Devices, their coordinates and their groups, computed from the degrees of parallelism.

The model axis varies fastest, then context, then data. The pipeline stage is outermost: of 8
devices with model=4 and data=2, devices 0 and 4 have the same weight shards. A rank controls one or
more consecutive devices. The devices of a mesh compute one pipeline stage of one replica together.
The ranks of a mesh form a model-parallel group.
"""

import dataclasses
import math

AXES = ("stage", "data", "context", "model")  # Outermost first.


@dataclasses.dataclass(frozen=True)
class Topology:
    """Grid of the devices of a job, one or more per rank.

    With one device per rank, device indices equal ranks.

    Args:
        stage: Integer. Number of pipeline stages.
        data: Integer. Number of data shards.
        context: Integer. Number of sequence shards.
        model: Integer. Number of weight shards.
        local_devices: Integer. Number of devices per rank.
        mesh_spans_data: Whether a mesh includes all devices of a stage, along the data axis as
            well.
        expert: Integer. Number of data shards of a mesh that experts are sharded over. `1` disables
            expert parallelism.

    Raises:
        ValueError: If the devices of a rank are neither an equal part of a stage's replica nor
            several full replicas, or if the experts cannot be sharded over the data shards of a
            mesh.

    Example:

    >>> topology = Topology(data=2, model=4)
    >>> topology.model_parallel_group(5), topology.data_parallel_group(5)
    ((4, 5, 6, 7), (1, 5))
    """

    stage: int = 1
    data: int = 1
    context: int = 1
    model: int = 1
    local_devices: int = 1
    mesh_spans_data: bool = False
    expert: int = 1

    def __post_init__(self):
        replica = self.model * self.context
        local = self.local_devices
        if replica % local and (local % replica or self.data % (local // replica)):
            raise ValueError(
                f"`local_devices={local}` must divide model_parallel={self.model}"
                f"{f' · context_parallel={self.context}' if self.context > 1 else ''}, or be a multiple "
                f"of it that divides its product with data_parallel={self.data}."
            )
        if self.data % self.expert:
            raise ValueError(
                f"`expert_parallel={self.expert}` must divide `data_parallel={self.data}`, because "
                "experts are sharded over ranks that share the batch."
            )
        if self.mesh_data * replica % local:
            raise ValueError(
                f"`expert_parallel={self.expert}` does not work with `local_devices={local}` per "
                f"rank, because meshes of {self.mesh_data * replica} devices would divide ranks."
            )
        if self.expert > 1 and self.mesh_data != self.expert:
            cause = f"`local_devices={local}` per rank" if local > 1 else "`optimizer_shard=3`"
            fewer = (
                ", or `optimizer_shard=2`" if self.mesh_spans_data else ", or fewer local devices"
            )
            raise ValueError(
                f"`expert_parallel={self.expert}` does not work with {cause}, whose mesh has "
                f"{self.mesh_data} data shards. Set `expert_parallel={self.mesh_data}` or 1{fewer}."
            )

    @classmethod
    def from_config(cls, config, num_ranks: int, local_devices: int = 1) -> "Topology":
        """Return the topology of a job with a `TransformerOpParallelConfig`.

        Raises:
            ValueError: If the product of the degrees is not the number of devices.
        """
        config = config.resolve(num_ranks, local_devices)
        return cls(
            stage=config.pipeline_stage,
            data=config.data_parallel,
            context=config.context_parallel,
            model=config.model_parallel,
            local_devices=local_devices,
            mesh_spans_data=config.mesh_spans_data,
            expert=config.expert_parallel,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.size // self.local_devices

    @property
    def mesh_data(self) -> int:
        """Size of a mesh along the data axis, which is the number of batch shards on it."""
        if self.mesh_spans_data:
            return self.data
        return max(self.local_devices // (self.model * self.context), self.expert)

    @property
    def _ranks_per_mesh(self):
        return max(self.mesh_data * self.model * self.context // self.local_devices, 1)

    def model_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s mesh."""
        first = rank - rank % self._ranks_per_mesh
        return tuple(range(first, first + self._ranks_per_mesh))

    def data_shard(self, rank: int) -> tuple[int, int]:
        """Return the `(index, count)` of the shard of a global batch for `rank`'s mesh."""
        count = self.data // self.mesh_data
        return rank // self._ranks_per_mesh % count, count

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the stage that have the same weight shards as `rank`."""
        index, count = self.data_shard(rank)
        first = rank - index * self._ranks_per_mesh
        return tuple(first + i * self._ranks_per_mesh for i in range(count))

    @property
    def _ranks_per_stage(self):
        return self.num_ranks // self.stage

    def get_stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self._ranks_per_stage

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks at `rank`'s position in every stage, first stage first."""
        first = rank % self._ranks_per_stage
        return tuple(range(first, self.num_ranks, self._ranks_per_stage))

    def __str__(self):
        axes = [f"{axis} {size}" for axis, size in zip(AXES, self.shape) if size > 1]
        if self.local_devices > 1:
            axes.append(f"{self.local_devices} devices a rank")
        return " · ".join(axes) or "one rank"


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in ascending order.

    Example:

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})
