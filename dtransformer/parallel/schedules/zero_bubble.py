"""Schedule whose backward passes are in two parts: for inputs, and later for weights.

Other stages wait for the gradients of inputs alone; those of weights fill the time in which a
stage would wait. What a forward pass keeps is kept until both are done.

Reference: Qi et al., 2023, "Zero bubble pipeline parallelism", arXiv 2401.10241, §2 and §3.
"""

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Instruction,
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
