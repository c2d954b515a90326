"""Placement of model chunks on the stages of a pipeline, as data.

The layers of a network are divided into model chunks that follow each other; a stage has one of
them, or several. Schedules, the simulator and the executor ask a `Placement` who is before and
after a chunk, and nothing else knows how chunks are laid out.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """The stage of each model chunk, in the order of the network.

    Two chunks that follow each other may be on one stage: what passes between them stays there.

    Args:
        stage_of_chunk: tuple of the number of each chunk's stage.

    Raises:
        ValueError: a stage has no chunk.

    Example:

    >>> placement = Placement((0, 1, 1, 0))
    >>> placement.chunks_of(0), placement.stage_after(0), placement.is_local(1)
    ((0, 3), 1, True)
    """

    stage_of_chunk: tuple[int, ...]

    def __post_init__(self):
        stages = set(self.stage_of_chunk)
        if stages != set(range(len(stages))):
            raise ValueError(
                f"each stage from 0 on needs a model chunk, got the stages {self.stage_of_chunk}"
            )

    @classmethod
    def looped(cls, num_stages: int, chunks_per_stage: int = 1) -> "Placement":
        """Return the placement that goes through all stages, again and again.

        Args:
            num_stages: number p of stages.
            chunks_per_stage: number v of chunks of each stage; 1 is a pipeline as it is best
                known, a chunk a stage.

        Example:

        >>> Placement.looped(3), Placement.looped(2, 2)
        (Placement(stage_of_chunk=(0, 1, 2)), Placement(stage_of_chunk=(0, 1, 0, 1)))
        """
        return cls(tuple(range(num_stages)) * chunks_per_stage)

    @classmethod
    def v_shaped(cls, num_stages: int, chunks_per_stage: int = 2) -> "Placement":
        """Return the placement that goes through all stages, and back.

        The first stage then has the network's first and last layers. Reference: Qi et al., 2024,
        "Pipeline parallelism with controllable memory", arXiv 2405.15362.

        Example:

        >>> Placement.v_shaped(3)
        Placement(stage_of_chunk=(0, 1, 2, 2, 1, 0))
        """
        there = tuple(range(num_stages))
        ways = [there[:: -1 if number % 2 else 1] for number in range(chunks_per_stage)]
        return cls(tuple(stage for way in ways for stage in way))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(set(self.stage_of_chunk))

    @property
    def num_chunks(self) -> int:
        """The number of model chunks of the network."""
        return len(self.stage_of_chunk)

    @property
    def last_chunk(self) -> int:
        """The number of the chunk that has the network's outputs, and the loss."""
        return self.num_chunks - 1

    def stage_of(self, chunk: int) -> int:
        """Return the stage that has a chunk."""
        return self.stage_of_chunk[chunk]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of a stage's chunks, in the order of the network."""
        return tuple(c for c, other in enumerate(self.stage_of_chunk) if other == stage)

    def stage_before(self, chunk: int) -> int | None:
        """Return the stage that has the chunk before one; None before the first."""
        return self.stage_of(chunk - 1) if chunk else None

    def stage_after(self, chunk: int) -> int | None:
        """Return the stage that has the chunk after one; None after the last."""
        return None if chunk == self.last_chunk else self.stage_of(chunk + 1)

    def is_local(self, chunk: int) -> bool:
        """Return whether what a chunk gives the next one stays on its stage."""
        return self.stage_after(chunk) == self.stage_of(chunk)

    @property
    def stage_pairs(self) -> list[tuple[int, int]]:
        """The pairs of stages, the lower first, that send each other something."""
        pairs = zip(self.stage_of_chunk, self.stage_of_chunk[1:])
        return sorted({tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]})

    def describe(self, chunk: int) -> str:
        """Return what a chunk is called in errors.

        Example:

        >>> Placement.looped(2).describe(1), Placement.looped(2, 2).describe(3)
        ('stage 1', 'model chunk 3 (stage 1)')
        """
        stage = f"stage {self.stage_of(chunk)}"
        return stage if self.num_chunks == self.num_stages else f"model chunk {chunk} ({stage})"
