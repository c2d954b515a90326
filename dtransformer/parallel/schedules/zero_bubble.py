"""Schedules that divide backward passes into input gradients and, later, weight gradients.

Other stages only wait for input gradients. Weight gradients fill the idle time of a stage.
Activations are stored until both are done.

Reference:
    Qi et al., 2023, "Zero bubble pipeline parallelism", arXiv 2401.10241, §2 and §3.
    V-shaped schedule: Qi et al., 2024, arXiv 2405.15362.
"""

import functools
import itertools

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    WEIGHT_GRADIENTS,
    Instruction,
    get_producer,
)
from dtransformer.parallel.schedules.placement import Placement


def zb_h1(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """Run 1F1B and delay the weight gradients of stage r by r micro-batches.

    A stage stores the activations of p micro-batches. With passes of equal duration, a stage is
    idle for a fraction (p − 1) / (3m + p − 1) of the time, a third of 1F1B's idle time. See
    `schedules.gpipe` for the arguments and the result.

    Example:

    >>> print(*zb_h1(1, Placement.looped(2), num_micro_batches=3))
    F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 W1.1 W2.1
    """
    (chunk,) = placement.get_chunks(stage)
    ahead = min(placement.num_stages - stage - 1, num_micro_batches)
    order = []

    def add(kind, k):
        if 0 <= k < num_micro_batches:
            order.append(Instruction(kind, k, chunk))

    for k in range(ahead):
        add(FORWARD, k)
    for k in range(num_micro_batches + stage):
        add(FORWARD, k + ahead)
        add(BACKWARD, k)
        add(WEIGHT_GRADIENTS, k - stage)
    return order


def zb_v(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """Run two chunks per stage in a V-shaped placement.

    A stage stores the activations of 2p chunks, as much memory as 1F1B needs. With passes of equal
    duration, stages are idle for about p − 1 passes, until the first micro-batch reaches the last
    stage. See `schedules.gpipe` for the arguments and the result.
    """
    return list(_by_priority(placement, num_micro_batches)[stage])


@functools.lru_cache(maxsize=8)
def _by_priority(placement, num_micro_batches):
    """Return the instructions of all stages, chosen by priority.

    In each time step, a stage runs the first pass that is possible.

    The order of priority is: input gradients of the earlier chunk, input gradients of the later
    chunk, forward passes of the later chunk, forward passes of the earlier chunk, weight gradients.
    A stage has at most 2p unfinished passes and reserves room for a returning micro-batch.
    """
    p = placement.num_stages
    m = num_micro_batches
    done = {}
    orders = [[] for _ in range(p)]
    counts = {}  # Maps (kind, chunk) to the number of started passes.

    def choices(stage):
        early, late = placement.get_chunks(stage)
        counts_by_pass = {
            (kind, c): counts.get((kind, c), 0) for kind in COMPUTATIONS for c in (early, late)
        }
        alive = sum(
            counts_by_pass[FORWARD, c] - counts_by_pass[WEIGHT_GRADIENTS, c] for c in (early, late)
        )
        is_returning = counts_by_pass[FORWARD, late] < counts_by_pass[FORWARD, early]
        room = {late: 2 * p, early: 2 * p - is_returning}
        for c in (early, late):
            if counts_by_pass[BACKWARD, c] < counts_by_pass[FORWARD, c]:
                yield Instruction(BACKWARD, counts_by_pass[BACKWARD, c], c)
        for c in (late, early):
            if counts_by_pass[FORWARD, c] < m and alive < room[c]:
                yield Instruction(FORWARD, counts_by_pass[FORWARD, c], c)
        waiting = [instruction for instruction in orders[stage] if instruction.kind == BACKWARD]
        finished = sum(counts_by_pass[WEIGHT_GRADIENTS, c] for c in (early, late))
        for instruction in waiting[finished : finished + 1]:
            yield Instruction(WEIGHT_GRADIENTS, instruction.micro_batch, instruction.chunk)

    def can_run(instruction, time):
        producer = get_producer(instruction, placement)
        return producer is None or done.get(producer, time + 1) <= time

    for time in itertools.count():
        started = []
        for stage, order in enumerate(orders):
            instruction = next(
                (instruction for instruction in choices(stage) if can_run(instruction, time)), None
            )
            if instruction is not None:
                order.append(instruction)
                started.append(instruction)
        for instruction in started:
            counts[instruction.kind, instruction.chunk] = (
                counts.get((instruction.kind, instruction.chunk), 0) + 1
            )
            done[instruction] = time + 1
        if all(len(order) == 2 * len(COMPUTATIONS) * m for order in orders):
            return tuple(map(tuple, orders))
