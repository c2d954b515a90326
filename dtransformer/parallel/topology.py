"""Ranks, their coordinates and their groups: pure functions of the degrees.

Ranks are numbered with the model axis fastest, then context, then data, and the
pipeline stage outermost: of 8 ranks with model=4 and data=2, ranks 0 and 4 hold
the same slices of the weights.
"""

import dataclasses
import math

AXES = ("stage", "data", "context", "model")  # outermost first


@dataclasses.dataclass(frozen=True)
class Topology:
    """The grid of a job's ranks.

    Args:
        stage, data, context, model: size of the grid along each axis.

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

    @classmethod
    def from_config(cls, config, num_ranks):
        """Return the grid of `num_ranks` ranks under a `TransformerOpParallelConfig`.

        Raises:
            ValueError: the degrees do not multiply to the number of ranks.
        """
        config = config.resolve(num_ranks)
        return cls(
            stage=config.pipeline_stage,
            data=config.data_parallel,
            context=config.context_parallel,
            model=config.model_parallel,
        )

    @property
    def shape(self):
        """The sizes of the axes, outermost first."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self):
        """The number of ranks."""
        return math.prod(self.shape)

    def coordinates(self, rank):
        """Return the place of `rank` along each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not one of the job's {self.size} ranks")
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape)):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place):
        """Return the rank at a place; axes that are not given are 0."""
        _check_axes(place)
        rank = 0
        for axis, size in zip(AXES, self.shape):
            position = place.get(axis, 0)
            if not 0 <= position < size:
                raise ValueError(f"{axis}={position} is outside of the grid {self}")
            rank = rank * size + position
        return rank

    def group(self, rank, *axes):
        """Return the ranks that differ from `rank` along `axes` only, in order."""
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
        """Return every group of ranks that differ along `axes` only, in order."""
        return tuple(dict.fromkeys(self.group(rank, *axes) for rank in range(self.size)))

    def island(self, rank):
        """Return the ranks that hold one copy of `rank`'s pipeline stage."""
        return self.group(rank, "context", "model")

    def __str__(self):
        return " · ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape) if size > 1) or (
            "one rank"
        )


def _check_axes(axes):
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"there is no axis {axis!r}; there are {', '.join(AXES)}")
