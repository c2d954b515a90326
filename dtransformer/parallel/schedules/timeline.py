"""Timelines of the computations and transfers on pipeline stages."""

import dataclasses
import json
import pathlib

from dtransformer.files import atomic_write
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
    """Instruction of a stage with its start and end time.

    Args:
        stage: Integer. Index of the stage. A transfer belongs to its receiver.
        instruction: `Instruction`.
        start: Start time, in the unit of the durations.
        end: End time.
    """

    stage: int
    instruction: Instruction
    start: float
    end: float

    @classmethod
    def from_fields(cls, fields: dict) -> "Event":
        """Return the event with the fields from `dataclasses.asdict`."""
        return cls(**{**fields, "instruction": Instruction(**fields["instruction"])})


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events of all stages in a step, measured or simulated.

    Args:
        events: Tuple of `Event` objects, ordered by start time.
        placement: `Placement` of the chunks on the stages.
    """

    events: tuple
    placement: Placement

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    def get_stage_events(self, stage: int) -> list[Event]:
        """Return the computations of a stage, in order."""
        return [event for event in self._computations() if event.stage == stage]

    def _computations(self):
        return [e for e in self.events if e.instruction.kind in COMPUTATIONS]

    @property
    def span(self) -> float:
        """Time from the start of the first computation to the end of the last one."""
        events = self._computations()
        return max(e.end for e in events) - min(e.start for e in events)

    @property
    def bubble(self) -> float:
        """Mean fraction of the span, in [0, 1), during which a stage does not compute."""
        busy = sum(e.end - e.start for e in self._computations())
        return 1 - busy / (self.num_stages * self.span)


def max_stored_micro_batches(instructions: list[Instruction]) -> int:
    """Return the maximum number of forward passes whose backward pass is not complete.

    It is the number of micro-batches, counted per model chunk, whose activations a stage stores at
    the same time. Chunks without a backward pass store nothing.
    """
    last = WEIGHT_GRADIENTS if divides_backward(instructions) else BACKWARD
    trained_chunks = {step.chunk for step in instructions if step.kind == last}
    alive = max_alive = 0
    for instruction in instructions:
        if instruction.chunk in trained_chunks:  # Frozen chunks store no activations.
            alive += {FORWARD: 1, last: -1}.get(instruction.kind, 0)
        max_alive = max(max_alive, alive)
    return max_alive


def divides_backward(instructions: list[Instruction]) -> bool:
    """Return whether a stage computes weight gradients separately from input gradients."""
    return any(instruction.kind == WEIGHT_GRADIENTS for instruction in instructions)


def write(timeline: Timeline, ideal: Timeline, path: str | pathlib.Path) -> None:
    """Write a timeline in the Trace Event Format for Perfetto and Chrome's `about:tracing`.

    Args:
        timeline: Measured `Timeline`, in seconds.
        ideal: `Timeline` of the same computations with instant transfers.
        path: Path of a .json file.

    Raises:
        ValueError: If the path does not end with .json.
        InputError: If the file cannot be written.
    """
    if pathlib.Path(path).suffix != ".json":
        raise ValueError(f"The path of a timeline must end with .json, got {str(path)!r}.")
    events = [*trace(timeline, 0, "measured"), *trace(ideal, 1, "with instant transfers")]
    with atomic_write(path) as file:
        file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace(timeline: Timeline, process_id: int, title: str) -> list[dict]:
    """Return the events of a timeline in the Trace Event Format, with one row per stage.

    Args:
        timeline: `Timeline` in seconds. The result has microseconds.
        process_id: Integer. Process id of the rows.
        title: String. Name of the process. The idle fraction is appended.

    Returns:
        A list of dicts.
    """
    start = min(event.start for event in timeline.events)
    names = [("process_name", 0, f"{title}: {timeline.bubble:.1%} idle")]
    names += [("thread_name", stage, f"stage {stage}") for stage in range(timeline.num_stages)]
    metadata = [
        {"name": kind, "ph": "M", "pid": process_id, "tid": row, "args": {"name": name}}
        for kind, row, name in names
    ]
    return metadata + [
        {
            "name": str(event.instruction),
            "cat": event.instruction.kind,
            "ph": "X",
            "ts": round((event.start - start) * 1e6, 1),
            "dur": round((event.end - event.start) * 1e6, 1),
            "pid": process_id,
            "tid": event.stage,
            "args": {"micro_batch": event.instruction.micro_batch},
        }
        for event in timeline.events
    ]
