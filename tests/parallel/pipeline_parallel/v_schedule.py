"""Custom pipeline schedule of the tests, with a V-shaped placement."""

from dtransformer.parallel.schedules.instruction import BACKWARD, FORWARD, Instruction
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.schedules import Schedule


def v_shaped(stage, placement, num_micro_batches):
    """Return all forward passes chunk by chunk, then all backward passes."""
    chunks, micro_batches = placement.get_chunks(stage), range(num_micro_batches)
    return [
        *(Instruction(FORWARD, k, chunk) for chunk in chunks for k in micro_batches),
        *(Instruction(BACKWARD, k, chunk) for chunk in reversed(chunks) for k in micro_batches),
    ]


V_SCHEDULE = Schedule(v_shaped, place=Placement.v_shaped, min_chunks=2, max_chunks=2)
