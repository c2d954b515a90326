"""Placement of model chunks on the stages of a pipeline.

The layers of a network are divided into consecutive model chunks. A stage has one or more of them.
Schedules, the simulator and the executor use a `Placement` to find the neighbors of a chunk. No
other code depends on the layout of the chunks.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Stage of each model chunk, in the order of the network.

    Consecutive chunks may be on the same stage. Tensors between them are not sent.

    Args:
        stage_of_chunk: Tuple of integers. Stage index of each chunk.

    Raises:
        ValueError: If a stage has no chunk.

    Example:

    >>> placement = Placement((0, 1, 1, 0))
    >>> placement.get_chunks(0), placement.stage_after(0), placement.is_local(1)
    ((0, 3), 1, True)
    """

    stage_of_chunk: tuple[int, ...]

    def __post_init__(self):
        stages = set(self.stage_of_chunk)
        if stages != set(range(len(stages))):
            raise ValueError(
                f"Each stage from 0 on needs a model chunk, got the stages {self.stage_of_chunk}."
            )

    @classmethod
    def looped(cls, num_stages: int, chunks_per_stage: int = 1) -> "Placement":
        """Return the placement that visits all stages in order, once for each chunk of a stage.

        Args:
            num_stages: Integer. Number p of stages.
            chunks_per_stage: Integer. Number v of chunks per stage. `1` is a plain pipeline.
                Defaults to `1`.

        Example:

        >>> Placement.looped(3), Placement.looped(2, 2)
        (Placement(stage_of_chunk=(0, 1, 2)), Placement(stage_of_chunk=(0, 1, 0, 1)))
        """
        return cls(tuple(range(num_stages)) * chunks_per_stage)

    @classmethod
    def v_shaped(cls, num_stages: int, chunks_per_stage: int = 2) -> "Placement":
        """Return the placement that visits the stages in order and then in reverse.

        With two chunks per stage, the first stage has the first and the last layers of the network.

        Reference:
            Qi et al., 2024, "Pipeline parallelism with controllable memory", arXiv 2405.15362.

        Example:

        >>> Placement.v_shaped(3)
        Placement(stage_of_chunk=(0, 1, 2, 2, 1, 0))
        """
        stages = tuple(range(num_stages))
        passes = [stages[:: -1 if i % 2 else 1] for i in range(chunks_per_stage)]
        return cls(tuple(stage for stages_in_order in passes for stage in stages_in_order))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(set(self.stage_of_chunk))

    @property
    def num_chunks(self) -> int:
        """Number of model chunks of the network."""
        return len(self.stage_of_chunk)

    @property
    def last_chunk(self) -> int:
        """Index of the chunk that computes the network's outputs and the loss."""
        return self.num_chunks - 1

    def get_stage(self, chunk: int) -> int:
        """Return the stage of a chunk."""
        return self.stage_of_chunk[chunk]

    def get_chunks(self, stage: int) -> tuple[int, ...]:
        """Return the indices of a stage's chunks, in the order of the network."""
        return tuple(c for c, owner in enumerate(self.stage_of_chunk) if owner == stage)

    def stage_before(self, chunk: int) -> int | None:
        """Return the stage of the previous chunk, or `None` for the first chunk."""
        return self.get_stage(chunk - 1) if chunk else None

    def stage_after(self, chunk: int) -> int | None:
        """Return the stage of the next chunk, or `None` for the last chunk."""
        return None if chunk == self.last_chunk else self.get_stage(chunk + 1)

    def is_local(self, chunk: int) -> bool:
        """Return whether the next chunk is on the same stage."""
        return self.stage_after(chunk) == self.get_stage(chunk)

    @property
    def stage_pairs(self) -> list[tuple[int, int]]:
        """Sorted pairs of communicating stages, each with the lower stage first."""
        pairs = zip(self.stage_of_chunk, self.stage_of_chunk[1:])
        return sorted({tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1]})

    def describe(self, chunk: int) -> str:
        """Return the name of a chunk for error messages.

        Example:

        >>> Placement.looped(2).describe(1), Placement.looped(2, 2).describe(3)
        ('stage 1', 'model chunk 3 (stage 1)')
        """
        stage = f"stage {self.get_stage(chunk)}"
        return stage if self.num_chunks == self.num_stages else f"model chunk {chunk} ({stage})"
