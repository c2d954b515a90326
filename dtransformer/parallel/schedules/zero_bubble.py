"""Schedules whose backward passes are in two parts: for inputs, and later for weights.

Other stages wait for the gradients of inputs alone; those of weights fill the time in which a
stage would wait. What a forward pass keeps is kept until both are done.

Reference: Qi et al., 2023, "Zero bubble pipeline parallelism", arXiv 2401.10241, §2 and §3; the
V-shaped one: Qi et al., 2024, arXiv 2405.15362.
"""

import functools
import itertools

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Instruction,
    needed_by,
)
from dtransformer.parallel.schedules.placement import Placement


def zb_h1(stage: int, placement: Placement, num_micro_batches: int) -> list[Instruction]:
    """1F1B, whose stage r computes gradients of weights r micro-batches later: p are alive.

    With passes of equal lengths a stage idles (p − 1) / (3m + p − 1) of the time: a third of
    1F1B's. Arguments and result are those of `schedules.gpipe`.

    Example:

    >>> print(*zb_h1(1, Placement.looped(2), num_micro_batches=3))
    F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 W1.1 W2.1
    """
    (chunk,) = placement.chunks_of(stage)
    ahead, order = min(placement.num_stages - stage - 1, num_micro_batches), []

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
    """Two chunks a stage, there and back: 2p chunks' activations are alive, 1F1B's memory.

    With passes of equal lengths stages idle while the first micro-batch comes to the last of
    them, p − 1 passes, and hardly any more. Arguments and result are those of
    `schedules.gpipe`, with a V-shaped placement.
    """
    return list(_by_priority(placement, num_micro_batches)[stage])


@functools.lru_cache(maxsize=8)
def _by_priority(placement, num_micro_batches):
    """Let every stage do, unit by unit, the first that it can do of what comes first.

    Gradients of inputs come first, those of its earlier chunk before the others, then forward
    passes, those of the later chunk before the others, then gradients of weights. A stage has at
    most 2p passes alive, and keeps room for a micro-batch that comes back.
    """
    p, m = placement.num_stages, num_micro_batches
    done, orders = {}, [[] for _ in range(p)]
    counts = {}  # (kind, chunk) -> number of passes that were started

    def choices(stage):
        early, late = placement.chunks_of(stage)
        number = {(kind, c): counts.get((kind, c), 0) for kind in _KINDS for c in (early, late)}
        alive = sum(number[FORWARD, c] - number[WEIGHT_GRADIENTS, c] for c in (early, late))
        comes_back = number[FORWARD, late] < number[FORWARD, early]
        room = {late: 2 * p, early: 2 * p - comes_back}
        for c in (early, late):
            if number[BACKWARD, c] < number[FORWARD, c]:
                yield Instruction(BACKWARD, number[BACKWARD, c], c)
        for c in (late, early):
            if number[FORWARD, c] < m and alive < room[c]:
                yield Instruction(FORWARD, number[FORWARD, c], c)
        waiting = [one for one in orders[stage] if one.kind == BACKWARD]
        finished = sum(number[WEIGHT_GRADIENTS, c] for c in (early, late))
        for one in waiting[finished : finished + 1]:
            yield Instruction(WEIGHT_GRADIENTS, one.micro_batch, one.chunk)

    def can_run(one, now):
        needed = needed_by(one, placement)
        return needed is None or done.get(needed, now + 1) <= now

    for now in itertools.count():
        started = []
        for stage, order in enumerate(orders):
            one = next((one for one in choices(stage) if can_run(one, now)), None)
            if one is not None:
                order.append(one)
                started.append(one)
        for one in started:
            counts[one.kind, one.chunk] = counts.get((one.kind, one.chunk), 0) + 1
            done[one] = now + 1
        if all(len(order) == 2 * len(_KINDS) * m for order in orders):
            return tuple(map(tuple, orders))


_KINDS = (FORWARD, BACKWARD, WEIGHT_GRADIENTS)
