"""Run a schedule on paper: when each stage does what, for given durations."""

import statistics

from dtransformer.parallel.pipeline import schedules
from dtransformer.parallel.pipeline.timeline import Event, Timeline

_SENDS = (schedules.SEND_ACTIVATIONS, schedules.SEND_GRADIENTS)
_RECEIVES = (schedules.RECEIVE_ACTIVATIONS, schedules.RECEIVE_GRADIENTS)


def simulate(all_instructions, forward=1.0, backward=2.0, message=0.0, update=0.0):
    """Run the instructions of all stages for given durations.

    A stage does one computation at a time. Messages travel meanwhile, from when both
    ends are ready; sending takes a stage no time.

    Args:
        all_instructions: list of the instructions of each stage, from
            `schedules.instructions`.
        forward, backward: the durations of a chunk's passes; functions of (stage, chunk)
            or the same number for all.
        message: how long a message travels.
        update: how long the reduction and the update take together.

    Returns:
        A `Timeline`.

    Raises:
        ValueError: the stages wait for each other for ever; names what each waits for.

    Example:

    >>> simulate(schedules.instructions("gpipe", 2, 3), forward=1, backward=2).bubble
    0.25
    """
    lengths = {
        kind: value if callable(value) else lambda stage, chunk, value=value: value
        for kind, value in ((schedules.FORWARD, forward), (schedules.BACKWARD, backward))
    }
    num_stages = len(all_instructions)
    position, clock = [0] * num_stages, [0.0] * num_stages
    sent, ready, arrived = {}, {}, {}  # (stage, instruction of the receiver) -> when
    events = []

    def deliver(key):
        if key in sent and key in ready:
            start = max(sent[key], ready[key])
            arrived[key] = start + message
            events.append(Event(*key, start, arrived[key]))

    def run(stage, one):
        """Carry an instruction out, or return False where its input is not there."""
        if one.kind in _SENDS:
            key = schedules.receiver(one, stage, num_stages)
            sent[key] = clock[stage]
            deliver(key)
        elif one.kind in _RECEIVES:
            ready[stage, one] = clock[stage]
            deliver((stage, one))
        else:
            needed = one.kind in schedules.COMPUTATIONS and _input_of(one, all_instructions[stage])
            if needed and (stage, needed) not in arrived:
                return False
            start = max(clock[stage], arrived[stage, needed] if needed else 0.0)
            length = update if one.kind == schedules.UPDATE else 0.0
            if one.kind in lengths:
                length = lengths[one.kind](stage, one.chunk)
            clock[stage] = start + length
            events.append(Event(stage, one, start, clock[stage]))
        return True

    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(all_instructions):
            while position[stage] < len(own) and run(stage, own[position[stage]]):
                position[stage] += 1
                moved = True
    stuck = [stage for stage in range(num_stages) if position[stage] < len(all_instructions[stage])]
    if stuck:
        waits = [
            f"stage {s} waits for the input of {all_instructions[s][position[s]]}" for s in stuck
        ]
        raise ValueError(f"the schedule never ends: {', '.join(waits)}")
    return Timeline(tuple(sorted(events, key=lambda e: (e.start, e.stage))), num_stages)


def _input_of(computation, own):
    """Return the receive that a computation of a stage needs; None where there is none."""
    kind = schedules.RECEIVE_GRADIENTS
    if computation.kind == schedules.FORWARD:
        kind = schedules.RECEIVE_ACTIVATIONS
    place = (kind, computation.micro_batch, computation.chunk)
    return next((i for i in own if (i.kind, i.micro_batch, i.chunk) == place), None)


def ideal_of(timeline, all_instructions):
    """Return the `Timeline` of the same computations, if messages took no time.

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

    return simulate(all_instructions, median(schedules.FORWARD), median(schedules.BACKWARD))
