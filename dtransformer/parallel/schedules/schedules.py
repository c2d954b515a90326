"""Pipeline schedules: what each stage does, in which order.

A schedule is a function that gives the order of a stage's computations, and a row of `SCHEDULES`.

References: GPipe, Huang et al., 2018, arXiv 1811.06965; 1F1B, Narayanan et al., 2019,
"PipeDream", and Narayanan et al., 2020, arXiv 2006.09503; interleaved 1F1B, Narayanan et
al., 2021, arXiv 2104.04473, §2.2. Those with a backward pass in two parts are in `zero_bubble`.
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
    """All forward passes, then all backward passes: m micro-batches are alive at once.

    Args:
        stage: number r of the stage, from 0.
        placement: the `Placement`, with one chunk a stage.
        num_micro_batches: number m of micro-batches of a step.

    Returns:
        A list of `Instruction`s that are computations only.

    Example:

    >>> print(*gpipe(0, Placement.looped(2), num_micro_batches=3))
    F0 F1 F2 B0 B1 B2
    """
    (chunk,) = placement.chunks_of(stage)
    numbers = range(num_micro_batches)
    return [Instruction(kind, k, chunk) for kind in (FORWARD, BACKWARD) for k in numbers]


def one_forward_one_backward(
    stage: int, placement: Placement, num_micro_batches: int
) -> list[Instruction]:
    """A backward pass as soon as it can be: min(p − r, m) micro-batches are alive at once.

    Arguments and result are those of `gpipe`.

    Example:

    >>> print(*one_forward_one_backward(0, Placement.looped(2), num_micro_batches=3))
    F0 F1 B0 F2 B1 B2
    """
    (chunk,) = placement.chunks_of(stage)
    numbers = range(num_micro_batches)
    return alternate(
        min(placement.num_stages - stage - 1, num_micro_batches),
        [Instruction(FORWARD, k, chunk) for k in numbers],
        [Instruction(BACKWARD, k, chunk) for k in numbers],
    )


def interleaved(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """1F1B with v chunks a stage: p micro-batches go through a chunk, then through the next.

    Arguments and result are those of `gpipe`, with a looped placement; m is a multiple of p.

    Example:

    >>> print(*interleaved(1, Placement.looped(2, 2), num_micro_batches=2))
    F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1
    """
    num_stages, chunks = placement.num_stages, placement.chunks_of(stage)
    total, turn = num_micro_batches * len(chunks), num_stages * len(chunks)

    def passes(kind, chunks):
        """Return the passes in the order of a kind, whose chunks come one after the other."""
        for number in range(total):
            group, within = divmod(number, turn)
            k = group * num_stages + within % num_stages
            yield Instruction(kind, k, chunks[within // num_stages])

    ahead = min(2 * (num_stages - stage - 1) + (len(chunks) - 1) * num_stages, total)
    return alternate(ahead, [*passes(FORWARD, chunks)], [*passes(BACKWARD, chunks[::-1])])


def alternate(
    ahead: int, forwards: list[Instruction], backwards: list[Instruction]
) -> list[Instruction]:
    """Return so many forward passes, then one of each in turn, then what is left."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A row of `SCHEDULES`: all that there is to a schedule.

    Args:
        order: a function as `gpipe`.
        place: a function of the number of stages and of the chunks of each that returns the
            `Placement`.
        min_chunks, max_chunks: how many chunks a stage may have; None for as many as one likes.
        full_turns: whether the number of micro-batches has to be a multiple of the stages'.
        divides_backward: whether gradients of weights are computed apart from those of inputs.
    """

    order: collections.abc.Callable
    place: collections.abc.Callable = Placement.looped
    min_chunks: int = 1
    max_chunks: int | None = 1
    full_turns: bool = False
    divides_backward: bool = False

    def allows(self, chunks_per_stage: int) -> bool:
        """Return whether stages may have so many chunks."""
        most = chunks_per_stage if self.max_chunks is None else self.max_chunks
        return self.min_chunks <= chunks_per_stage <= most


# The names that `pipeline_schedule` can have in the config.
SCHEDULES = {
    "1f1b": Schedule(one_forward_one_backward),
    "gpipe": Schedule(gpipe),
    "interleaved": Schedule(interleaved, min_chunks=2, max_chunks=None, full_turns=True),
    "zb_h1": Schedule(zb_h1, divides_backward=True),
    "zb_v": Schedule(zb_v, Placement.v_shaped, min_chunks=2, max_chunks=2, divides_backward=True),
}


def check(name: str, num_stages: int, num_micro_batches: int, chunks_per_stage: int = 1) -> None:
    """Check that a schedule can be carried out.

    Args:
        name: one of `SCHEDULES`.
        num_stages: number p of stages.
        num_micro_batches: number m of micro-batches of a step.
        chunks_per_stage: number v of chunks of each stage.

    Raises:
        ValueError: there are fewer micro-batches than stages,
            or the chunks are not what the schedule takes.
    """
    schedule = SCHEDULES[name]
    if num_micro_batches < num_stages:
        raise ValueError(
            f"micro_batch_num={num_micro_batches} is less than pipeline_stage={num_stages}: some "
            f"stages would never work at the same time; set micro_batch_num={num_stages} or more"
        )
    if not schedule.allows(chunks_per_stage):
        others = [repr(other) for other, row in SCHEDULES.items() if row.allows(chunks_per_stage)]
        fitting = f"{schedule.min_chunks}{' or more' * (schedule.max_chunks is None)}"
        raise ValueError(
            f"pipeline_chunks={chunks_per_stage} does not work with pipeline_schedule={name!r}: set "
            f"pipeline_chunks={fitting}, or pipeline_schedule={' or '.join(others)}"
        )
    if schedule.full_turns and num_micro_batches % num_stages:
        raise ValueError(
            f"pipeline_schedule={name!r} needs a multiple of pipeline_stage={num_stages} as "
            f"micro_batch_num, got {num_micro_batches}"
        )


def instructions(
    name: str, placement: Placement, num_micro_batches: int
) -> list[list[Instruction]]:
    """Return what every stage does in a step.

    A stage says that it is ready to receive what its next computation needs before it
    starts the current one, so that sends go on meanwhile.

    Args:
        name: one of `SCHEDULES`.
        placement: the `Placement`.
        num_micro_batches: number m of micro-batches of a step; see `check`.

    Returns:
        A list with the list of `Instruction`s of each stage.

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
