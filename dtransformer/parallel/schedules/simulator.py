"""Simulation of a schedule with given durations."""

import statistics

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVES,
    SENDS,
    WEIGHT_GRADIENTS,
    Instruction,
    get_input,
    get_receive,
)
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.timeline import Event, Timeline, divides_backward


def simulate(
    all_instructions: list[list[Instruction]],
    placement: Placement,
    forward=1.0,
    backward=None,
    transfer: float = 0.0,
    weight_gradients=1.0,
) -> Timeline:
    """Compute the timeline of a schedule for given durations.

    A stage runs one computation at a time. Transfers overlap with computations and start when both
    ends are ready. Sending takes no time on the stage.

    Args:
        all_instructions: List of the instructions of each stage, from `schedules.instructions`.
        placement: `Placement` of the schedule.
        forward: Duration of a chunk's forward pass: a number, or a function of `(stage, chunk)`.
            Defaults to `1.0`.
        backward: Duration of a chunk's backward pass, in the same form. `None` means 2, or 1 if
            weight gradients are computed separately.
        transfer: Duration of a transfer. Defaults to `0.0`.
        weight_gradients: Duration of separate weight gradients, in the form of `forward`. Defaults
            to `1.0`.

    Returns:
        A `Timeline`.

    Raises:
        ValueError: If the schedule deadlocks. The message names the missing input of each stage.

    Example:

    >>> from dtransformer.parallel.schedules.placement import Placement
    >>> from dtransformer.parallel.schedules.schedules import instructions
    >>> placement = Placement.looped(2)
    >>> simulate(instructions("gpipe", placement, 3), placement).bubble
    0.25
    """
    if backward is None:
        backward = 1.0 if any(map(divides_backward, all_instructions)) else 2.0
    durations = {FORWARD: forward, BACKWARD: backward, WEIGHT_GRADIENTS: weight_gradients}
    duration_of = {
        kind: value if callable(value) else lambda stage, chunk, value=value: value
        for kind, value in durations.items()
    }
    position = [0] * placement.num_stages
    clock = [0.0] * placement.num_stages
    # Maps a receive to the times when its sender and its receiver are ready.
    sent = {}
    ready = {}
    done = {}  # Maps a receive or a computation to its end time.
    events = []

    def deliver(receive, stage):
        if receive in sent and receive in ready:
            start = max(sent[receive], ready[receive])
            done[receive] = start + transfer
            events.append(Event(stage, receive, start, done[receive]))

    def run(stage, instruction):
        """Execute an instruction and return True, or return False if its input is missing."""
        if instruction.kind in SENDS:
            receive = get_receive(instruction, placement)
            sent[receive] = clock[stage]
            deliver(receive, instruction.peer)
        elif instruction.kind in RECEIVES:
            ready[instruction] = clock[stage]
            deliver(instruction, stage)
        else:
            producer = get_input(instruction, placement)
            if producer is not None and producer not in done:
                return False
            start = max(clock[stage], done.get(producer, 0.0))
            clock[stage] = done[instruction] = start + duration_of[instruction.kind](
                stage, instruction.chunk
            )
            events.append(Event(stage, instruction, start, clock[stage]))
        return True

    has_progress = True
    while has_progress:
        has_progress = False
        for stage, instructions in enumerate(all_instructions):
            while position[stage] < len(instructions) and run(stage, instructions[position[stage]]):
                position[stage] += 1
                has_progress = True
    waits = [
        f"Stage {stage} waits for the input of {instructions[position[stage]]}."
        for stage, instructions in enumerate(all_instructions)
        if position[stage] < len(instructions)
    ]
    if waits:
        raise ValueError(f"The schedule deadlocks. {' '.join(waits)}")
    return Timeline(tuple(sorted(events, key=lambda e: (e.start, e.stage))), placement)


def ideal_timeline(timeline: Timeline, all_instructions: list[list[Instruction]]) -> Timeline:
    """Return the `Timeline` of the same computations with instant transfers.

    Args:
        timeline: Measured `Timeline`. Durations are the medians of each stage and kind.
        all_instructions: List of the instructions of each stage.
    """

    def median(kind):
        def median_of_chunk(stage, chunk):
            lengths = [
                event.end - event.start
                for event in timeline.get_stage_events(stage)
                if event.instruction.kind == kind
            ]
            return statistics.median(lengths)

        return median_of_chunk

    durations = {kind: median(kind) for kind in COMPUTATIONS}
    return simulate(all_instructions, timeline.placement, **durations)
