"""Devices, their coordinates and their groups: pure functions of the degrees.

Devices are numbered with the model axis fastest, then context, then data, and the
pipeline stage outermost: of 8 devices with model=4 and data=2, devices 0 and 4 hold
the same slices of the weights. A rank drives one or more devices that follow each
other; an island is the ranks that compute together, on one mesh.
"""

import dataclasses
import math

AXES = ("stage", "data", "context", "model")  # outermost first


@dataclasses.dataclass(frozen=True)
class Topology:
    """The grid of a job's devices, one or more a rank.

    With one device a rank, devices and ranks have the same numbers.

    Args:
        stage, data, context, model: size of the grid along each axis.
        local_devices: number of devices of each rank.
        mesh_spans_data: whether an island has all devices of a stage: the whole data axis.

    Raises:
        ValueError: the devices of a rank do not make up whole rows of the grid, or an
            even part of one.

    Example:

    >>> topology = Topology(data=2, model=4)
    >>> topology.coordinates(5)
    {'stage': 0, 'data': 1, 'context': 0, 'model': 1}
    >>> topology.group(5, "data")
    (1, 5)
    """

    stage: int = 1
    data: int = 1
    context: int = 1
    model: int = 1
    local_devices: int = 1
    mesh_spans_data: bool = False

    def __post_init__(self):
        row, local = self.model * self.context, self.local_devices
        if row % local and (local % row or self.data % (local // row)):
            raise ValueError(
                f"local_devices={local} must divide model_parallel={self.model}"
                f"{f' · context_parallel={self.context}' * (self.context > 1)}, or be a multiple of "
                f"it that divides it times data_parallel={self.data}"
            )

    @classmethod
    def from_config(cls, config, num_ranks, local_devices=1):
        """Return the grid of a job under a `TransformerOpParallelConfig`.

        Raises:
            ValueError: the degrees do not multiply to the number of devices.
        """
        config = config.resolve(num_ranks, local_devices)
        return cls(
            stage=config.pipeline_stage,
            data=config.data_parallel,
            context=config.context_parallel,
            model=config.model_parallel,
            local_devices=local_devices,
            # Weights that are cut over both axes are gathered inside of the computation.
            mesh_spans_data=config.optimizer_shard == 3 and config.model_parallel > 1,
        )

    @property
    def shape(self):
        """The sizes of the axes, outermost first."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self):
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def num_ranks(self):
        """The number of ranks."""
        return self.size // self.local_devices

    @property
    def mesh_data(self):
        """The number of slices of the batch that one island computes."""
        if self.mesh_spans_data:
            return self.data
        return max(self.local_devices // (self.model * self.context), 1)

    def coordinates(self, rank):
        """Return the place of a device along each axis."""
        self._check(rank, self.size)
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape)):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place):
        """Return the device at a place; axes that are not given are 0."""
        _check_axes(place)
        rank = 0
        for axis, size in zip(AXES, self.shape):
            position = place.get(axis, 0)
            if not 0 <= position < size:
                raise ValueError(f"{axis}={position} is outside of the grid {self}")
            rank = rank * size + position
        return rank

    def group(self, rank, *axes):
        """Return the devices that differ from `rank` along `axes` only, in order."""
        _check_axes(axes)
        here = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.size)
            if all(
                place == here[axis]
                for axis, place in self.coordinates(other).items()
                if axis not in axes
            )
        )

    def groups(self, *axes):
        """Return every group of devices that differ along `axes` only, in order."""
        return tuple(dict.fromkeys(self.group(rank, *axes) for rank in range(self.size)))

    @staticmethod
    def _check(rank, number):
        if not 0 <= rank < number:
            raise ValueError(f"rank {rank} is not one of the job's {number} ranks")

    @property
    def _ranks_per_mesh(self):
        return max(self.mesh_data * self.model * self.context // self.local_devices, 1)

    def model_parallel_group(self, rank):
        """Return the ranks that compute together with `rank`, on one mesh."""
        self._check(rank, self.num_ranks)
        first = rank - rank % self._ranks_per_mesh
        return tuple(range(first, first + self._ranks_per_mesh))

    def data_shard(self, rank):
        """Return (index, count): the share of every global batch that `rank`'s island takes."""
        count = self.data // self.mesh_data
        return rank // self._ranks_per_mesh % count, count

    def data_parallel_group(self, rank):
        """Return the ranks that hold the same slices as `rank` in the stage's islands."""
        index, count = self.data_shard(rank)
        first = rank - index * self._ranks_per_mesh
        return tuple(first + i * self._ranks_per_mesh for i in range(count))

    @property
    def _ranks_per_stage(self):
        return self.num_ranks // self.stage

    def stage_of(self, rank):
        """Return the pipeline stage that a rank belongs to."""
        self._check(rank, self.num_ranks)
        return rank // self._ranks_per_stage

    def pipeline_group(self, rank):
        """Return the ranks with `rank`'s place in every stage, from the first stage on."""
        first = rank % self._ranks_per_stage
        return tuple(range(first, self.num_ranks, self._ranks_per_stage))

    def __str__(self):
        axes = [f"{axis} {size}" for axis, size in zip(AXES, self.shape) if size > 1]
        if self.local_devices > 1:
            axes.append(f"{self.local_devices} devices a rank")
        return " · ".join(axes) or "one rank"


def _check_axes(axes):
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"there is no axis {axis!r}; there are {', '.join(AXES)}")
