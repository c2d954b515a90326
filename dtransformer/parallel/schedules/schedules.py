"""Pipeline schedules: the order of the computations on each stage.

A schedule is a function that returns the order of a stage's computations, and an entry in
`SCHEDULES`. `zero_bubble` has the schedules that divide backward passes.

Reference:
    GPipe: Huang et al., 2018, arXiv 1811.06965.
    1F1B: Narayanan et al., 2019, "PipeDream", and Narayanan et al., 2020, arXiv 2006.09503.
    Interleaved 1F1B: Narayanan et al., 2021, arXiv 2104.04473, §2.2.
"""

import collections.abc
import dataclasses

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    FORWARD,
    Instruction,
    with_transfers,
)
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.zero_bubble import zb_h1, zb_v


def gpipe(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """Run all forward passes, then all backward passes.

    A stage stores the activations of all m micro-batches.

    Args:
        stage: Integer. Index r of the stage, from 0.
        placement: `Placement` with one chunk per stage.
        num_micro_batches: Integer. Number m of micro-batches per step.

    Returns:
        A list of `Instruction` objects, only computations.

    Example:

    >>> print(*gpipe(0, Placement.looped(2), num_micro_batches=3))
    F0 F1 F2 B0 B1 B2
    """
    (chunk,) = placement.get_chunks(stage)
    micro_batches = range(num_micro_batches)
    return [Instruction(kind, k, chunk) for kind in (FORWARD, BACKWARD) for k in micro_batches]


def one_forward_one_backward(
    stage: int, placement: Placement, num_micro_batches: int
) -> list[Instruction]:
    """Run each backward pass as early as possible (1F1B).

    A stage stores the activations of min(p − r, m) micro-batches. See `gpipe` for the arguments and
    the result.

    Example:

    >>> print(*one_forward_one_backward(0, Placement.looped(2), num_micro_batches=3))
    F0 F1 B0 F2 B1 B2
    """
    (chunk,) = placement.get_chunks(stage)
    micro_batches = range(num_micro_batches)
    return alternate(
        min(placement.num_stages - stage - 1, num_micro_batches),
        [Instruction(FORWARD, k, chunk) for k in micro_batches],
        [Instruction(BACKWARD, k, chunk) for k in micro_batches],
    )


def interleaved(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """Run 1F1B with v chunks per stage.

    p micro-batches pass through a chunk before the stage continues with its next chunk. See `gpipe`
    for the arguments and the result. The placement must be looped, and p must divide m.

    Example:

    >>> print(*interleaved(1, Placement.looped(2, 2), num_micro_batches=2))
    F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1
    """
    num_stages = placement.num_stages
    chunks = placement.get_chunks(stage)
    total = num_micro_batches * len(chunks)
    period = num_stages * len(chunks)

    def passes(kind, chunks):
        """Yield the passes of a kind in order, over the chunks in the given order."""
        for i in range(total):
            group, position = divmod(i, period)
            k = group * num_stages + position % num_stages
            yield Instruction(kind, k, chunks[position // num_stages])

    ahead = min(2 * (num_stages - stage - 1) + (len(chunks) - 1) * num_stages, total)
    return alternate(ahead, [*passes(FORWARD, chunks)], [*passes(BACKWARD, chunks[::-1])])


def alternate(
    ahead: int, forwards: list[Instruction], backwards: list[Instruction]
) -> list[Instruction]:
    """Return `ahead` forward passes, alternating passes, then the other backward passes."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Entry of `SCHEDULES` that describes a schedule.

    Args:
        order: Function with the arguments and result of `gpipe`.
        place: Function of the number of stages and the number of chunks per stage that returns the
            `Placement`.
        min_chunks: Integer. Minimum number of chunks per stage.
        max_chunks: Integer. Maximum number of chunks per stage. `None` means no limit.
        full_turns: Whether the number of stages must divide the number of micro-batches.
        divides_backward: Whether weight gradients are computed separately from input gradients.
    """

    order: collections.abc.Callable
    place: collections.abc.Callable = Placement.looped
    min_chunks: int = 1
    max_chunks: int | None = 1
    full_turns: bool = False
    divides_backward: bool = False

    def allows(self, chunks_per_stage: int) -> bool:
        """Return whether the schedule supports this number of chunks per stage."""
        max_chunks = chunks_per_stage if self.max_chunks is None else self.max_chunks
        return self.min_chunks <= chunks_per_stage <= max_chunks


# Values of `pipeline_schedule` in the config.
SCHEDULES = {
    "1f1b": Schedule(one_forward_one_backward),
    "gpipe": Schedule(gpipe),
    "interleaved": Schedule(interleaved, min_chunks=2, max_chunks=None, full_turns=True),
    "zb_h1": Schedule(zb_h1, divides_backward=True),
    "zb_v": Schedule(zb_v, Placement.v_shaped, min_chunks=2, max_chunks=2, divides_backward=True),
}


def check(name: str, num_stages: int, num_micro_batches: int, chunks_per_stage: int = 1) -> None:
    """Check that a schedule supports a layout.

    Args:
        name: String. Key of `SCHEDULES`.
        num_stages: Integer. Number p of stages.
        num_micro_batches: Integer. Number m of micro-batches per step.
        chunks_per_stage: Integer. Number v of chunks per stage. Defaults to `1`.

    Raises:
        ValueError: If there are fewer micro-batches than stages, the schedule does not support the
            number of chunks, or p must divide m but does not.
    """
    schedule = SCHEDULES[name]
    if num_micro_batches < num_stages:
        raise ValueError(
            f"`micro_batch_num={num_micro_batches}` is less than `pipeline_stage={num_stages}`, so "
            f"some stages would never work at the same time. Set `micro_batch_num={num_stages}` or "
            "more."
        )
    if not schedule.allows(chunks_per_stage):
        alternatives = [
            repr(alternative)
            for alternative, row in SCHEDULES.items()
            if row.allows(chunks_per_stage)
        ]
        fitting = f"{schedule.min_chunks}{' or more' if schedule.max_chunks is None else ''}"
        raise ValueError(
            f"`pipeline_chunks={chunks_per_stage}` does not work with `pipeline_schedule={name!r}`. "
            f"Set `pipeline_chunks` to {fitting}, or `pipeline_schedule` to {' or '.join(alternatives)}."
        )
    if schedule.full_turns and num_micro_batches % num_stages:
        raise ValueError(
            f"`micro_batch_num={num_micro_batches}` must be a multiple of "
            f"`pipeline_stage={num_stages}` with `pipeline_schedule={name!r}`."
        )


def instructions(
    name: str, placement: Placement, num_micro_batches: int
) -> list[list[Instruction]]:
    """Return the instructions of every stage in a step.

    Before each computation, a stage posts the receive of the next one, so that transfers overlap
    with computations.

    Args:
        name: String. Key of `SCHEDULES`.
        placement: `Placement`.
        num_micro_batches: Integer. Number m of micro-batches per step. See `check`.

    Returns:
        A list with a list of `Instruction` objects per stage.

    Example:

    >>> for stage in instructions("1f1b", Placement.looped(2), num_micro_batches=2):
    ...     print(*stage)
    F0 a>0 g<0 F1 a>1 g<1 B0 B1
    a<0.1 F0.1 a<1.1 B0.1 g>0.1 F1.1 B1.1 g>1.1
    """
    return [
        with_transfers(SCHEDULES[name].order(stage, placement, num_micro_batches), placement)
        for stage in range(placement.num_stages)
    ]
