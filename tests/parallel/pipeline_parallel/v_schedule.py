"""A schedule of the tests' own: one function and one row, over a placement in a V."""

from dtransformer.parallel.schedules.instruction import BACKWARD, FORWARD, Instruction
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.schedules import Schedule


def v_shaped(stage, placement, num_micro_batches):
    """All forward passes chunk by chunk, then all backward passes."""
    chunks, numbers = placement.chunks_of(stage), range(num_micro_batches)
    return [
        *(Instruction(FORWARD, k, chunk) for chunk in chunks for k in numbers),
        *(Instruction(BACKWARD, k, chunk) for chunk in reversed(chunks) for k in numbers),
    ]


V_SCHEDULE = Schedule(v_shaped, place=Placement.v_shaped, min_chunks=2, max_chunks=2)
