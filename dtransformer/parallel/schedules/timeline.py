"""Timelines: what the stages of a pipeline did, and when."""

import dataclasses
import json
import pathlib

from dtransformer.files import replacing
from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    WEIGHT_GRADIENTS,
    Instruction,
)
from dtransformer.parallel.schedules.placement import Placement


@dataclasses.dataclass(frozen=True)
class Event:
    """What a stage does for a time, in the unit of the durations.

    Args:
        stage: number of the stage.
        instruction: the `Instruction`.
        start, end: when. What is sent is its receiver's.
    """

    stage: int
    instruction: Instruction
    start: float
    end: float

    @classmethod
    def of(cls, fields: dict) -> "Event":
        """Return the event of what `dataclasses.asdict` tells of it."""
        return cls(**{**fields, "instruction": Instruction(**fields["instruction"])})


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What all stages did in a step, measured or simulated.

    Args:
        events: tuple of `Event`s, in the order of their starts.
        placement: the `Placement` of the chunks on the stages.
    """

    events: tuple
    placement: Placement

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    def of_stage(self, stage: int) -> list[Event]:
        """Return the computations of a stage, in order."""
        return [event for event in self._computations() if event.stage == stage]

    def _computations(self):
        return [e for e in self.events if e.instruction.kind in COMPUTATIONS]

    @property
    def span(self) -> float:
        """The time from the first computation's start to the last one's end."""
        events = self._computations()
        return max(e.end for e in events) - min(e.start for e in events)

    @property
    def bubble(self) -> float:
        """The share of the span, in [0, 1), that a stage spends without computing; their mean."""
        busy = sum(e.end - e.start for e in self._computations())
        return 1 - busy / (self.num_stages * self.span)


def most_alive(instructions: list[Instruction]) -> int:
    """Return the largest number of forward passes whose backward pass is not done, all of it.

    That many micro-batches' activations, of one model chunk each, a stage keeps at once.
    """
    last = WEIGHT_GRADIENTS if divides_backward(instructions) else BACKWARD
    of_chunks = {one.chunk for one in instructions if one.kind == last}
    alive = most = 0
    for instruction in instructions:
        if instruction.chunk in of_chunks:  # others, which are frozen, keep nothing
            alive += {FORWARD: 1, last: -1}.get(instruction.kind, 0)
        most = max(most, alive)
    return most


def divides_backward(instructions: list[Instruction]) -> bool:
    """Return whether a stage computes gradients of weights apart from those of inputs."""
    return any(instruction.kind == WEIGHT_GRADIENTS for instruction in instructions)


def write(timeline: Timeline, ideal: Timeline, path: str | pathlib.Path) -> None:
    """Write a timeline in the Trace Event Format, which Perfetto and Chrome's `about:tracing` show.

    Args:
        timeline: the measured `Timeline`, in seconds.
        ideal: the `Timeline` of the same computations if sends took no time.
        path: where; it ends with .json.

    Raises:
        ValueError: the path ends otherwise.
        InputError: the file cannot be written.
    """
    if pathlib.Path(path).suffix != ".json":
        raise ValueError(f"a timeline is written to a .json file, got {str(path)!r}")
    events = [*trace(timeline, 0, "measured"), *trace(ideal, 1, "if sends took no time")]
    with replacing(path) as fresh:
        fresh.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace(timeline: Timeline, number: int, title: str) -> list[dict]:
    """Return the events of a timeline in the Trace Event Format, a row a stage; times are in µs.

    Args:
        timeline: the `Timeline`.
        number: that of the process which the rows are put under.
        title: its name, to which the idle share is added.
    """
    begin = min(event.start for event in timeline.events)
    names = [("process_name", 0, f"{title}: {timeline.bubble:.1%} idle")]
    names += [("thread_name", stage, f"stage {stage}") for stage in range(timeline.num_stages)]
    told = [
        {"name": kind, "ph": "M", "pid": number, "tid": row, "args": {"name": name}}
        for kind, row, name in names
    ]
    return told + [
        {
            "name": str(event.instruction),
            "cat": event.instruction.kind,
            "ph": "X",
            "ts": round((event.start - begin) * 1e6, 1),
            "dur": round((event.end - event.start) * 1e6, 1),
            "pid": number,
            "tid": event.stage,
            "args": {"micro_batch": event.instruction.micro_batch},
        }
        for event in timeline.events
    ]
