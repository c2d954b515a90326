"""Run a schedule on paper: when each stage does what, for given durations."""

import statistics

from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVES,
    SENDS,
    WEIGHT_GRADIENTS,
    Instruction,
    input_of,
    receive_of,
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
    """Run the instructions of all stages for given durations.

    A stage does one computation at a time. What is sent travels meanwhile, from when both
    ends are ready; sending takes a stage no time.

    Args:
        all_instructions: list of the instructions of each stage, from
            `schedules.instructions`.
        placement: the `Placement` that they are for.
        forward, backward: the durations of a chunk's passes; functions of (stage, chunk)
            or the same number for all. A backward pass takes 2 by default, and 1 where the
            gradients of weights are apart.
        transfer: how long a send travels.
        weight_gradients: as `forward`, of the gradients of weights where they are apart.

    Returns:
        A `Timeline`.

    Raises:
        ValueError: the stages wait for each other for ever; names what each waits for.

    Example:

    >>> from dtransformer.parallel.schedules.placement import Placement
    >>> from dtransformer.parallel.schedules.schedules import instructions
    >>> placement = Placement.looped(2)
    >>> simulate(instructions("gpipe", placement, 3), placement).bubble
    0.25
    """
    if backward is None:
        backward = 1.0 if any(map(divides_backward, all_instructions)) else 2.0
    given = {FORWARD: forward, BACKWARD: backward, WEIGHT_GRADIENTS: weight_gradients}
    lengths = {
        kind: value if callable(value) else lambda stage, chunk, value=value: value
        for kind, value in given.items()
    }
    position, clock = [0] * placement.num_stages, [0.0] * placement.num_stages
    sent, ready = {}, {}  # a receive -> when the sender and the receiver came to it
    done = {}  # a receive or a computation -> when
    events = []

    def deliver(receive, stage):
        if receive in sent and receive in ready:
            start = max(sent[receive], ready[receive])
            done[receive] = start + transfer
            events.append(Event(stage, receive, start, done[receive]))

    def run(stage, one):
        """Carry an instruction out, or return False where its input is not there."""
        if one.kind in SENDS:
            receive = receive_of(one, placement)
            sent[receive] = clock[stage]
            deliver(receive, one.peer)
        elif one.kind in RECEIVES:
            ready[one] = clock[stage]
            deliver(one, stage)
        else:
            needed = input_of(one, placement)
            if needed is not None and needed not in done:
                return False
            start = max(clock[stage], done.get(needed, 0.0))
            clock[stage] = done[one] = start + lengths[one.kind](stage, one.chunk)
            events.append(Event(stage, one, start, clock[stage]))
        return True

    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(all_instructions):
            while position[stage] < len(own) and run(stage, own[position[stage]]):
                position[stage] += 1
                moved = True
    waits = [
        f"stage {stage} waits for the input of {own[position[stage]]}"
        for stage, own in enumerate(all_instructions)
        if position[stage] < len(own)
    ]
    if waits:
        raise ValueError(f"the schedule never ends: {', '.join(waits)}")
    return Timeline(tuple(sorted(events, key=lambda e: (e.start, e.stage))), placement)


def ideal_of(timeline: Timeline, all_instructions: list[list[Instruction]]) -> Timeline:
    """Return the `Timeline` of the same computations, if nothing that is sent took any time.

    Args:
        timeline: a measured `Timeline`, from whose computations the durations are taken: the
            median of each stage and kind.
        all_instructions: list of the instructions of each stage.
    """

    def median(kind):
        def of(stage, chunk):
            lengths = [
                event.end - event.start
                for event in timeline.of_stage(stage)
                if event.instruction.kind == kind
            ]
            return statistics.median(lengths)

        return of

    durations = {kind: median(kind) for kind in COMPUTATIONS}
    return simulate(all_instructions, timeline.placement, **durations)
