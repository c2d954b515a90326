"""Timelines: what the stages of a pipeline did, and when."""

import dataclasses
import json
import pathlib

from dtransformer.errors import check_installed
from dtransformer.files import replacing
from dtransformer.parallel.schedules.instruction import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    WEIGHT_GRADIENTS,
    Instruction,
)
from dtransformer.parallel.schedules.placement import Placement

# Of a stage's first chunk, and of the others.
_COLORS = {
    FORWARD: ("#4c78a8", "#7aa6d1"),
    BACKWARD: ("#f58518", "#f9b06a"),
    WEIGHT_GRADIENTS: ("#b279a2", "#cfa7c3"),
}
_TRANSFER = "#54a24b"


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

    def to_json(self) -> list:
        """Return it as what JSON can say."""
        return [self.stage, dataclasses.asdict(self.instruction), self.start, self.end]

    @classmethod
    def from_json(cls, value: list) -> "Event":
        """Return the event that `to_json` returned a value of."""
        stage, instruction, start, end = value
        return cls(stage, Instruction(**instruction), start, end)


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
    """Write a timeline, by the ending of the path: a trace in JSON, or a picture.

    The trace is in the Trace Event Format, which Perfetto and Chrome's `about:tracing`
    show: one row a stage. The picture has the measured step above the ideal one.

    Args:
        timeline: the measured `Timeline`, in seconds.
        ideal: the `Timeline` of the same computations if sends took no time.
        path: where; it ends with .json or .png.

    Raises:
        ValueError: the path ends otherwise.
        InputError: the file cannot be written.
        ImportError: a picture is asked for, and matplotlib is not there.
    """
    suffix = pathlib.Path(path).suffix
    if suffix == ".json":
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(trace(timeline)))
    elif suffix == ".png":
        figure = plot(timeline, ideal)
        with replacing(path) as fresh:
            figure.savefig(fresh, dpi=120)
    else:
        raise ValueError(f"a timeline is written to a .json or .png file, got {str(path)!r}")


def trace(timeline: Timeline) -> dict:
    """Return a timeline in the Trace Event Format, a dict; times are in µs."""
    begin = min(event.start for event in timeline.events)
    events = [
        {
            "name": str(event.instruction),
            "cat": event.instruction.kind,
            "ph": "X",
            "ts": round((event.start - begin) * 1e6, 1),
            "dur": round((event.end - event.start) * 1e6, 1),
            "pid": 0,
            "tid": event.stage,
            "args": {"micro_batch": event.instruction.micro_batch},
        }
        for event in timeline.events
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
        for s in range(timeline.num_stages)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def plot(timeline: Timeline, ideal: Timeline):
    """Return a figure of a measured timeline and of the ideal one."""
    check_installed("matplotlib", "pictures")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.6 + 0.9 * timeline.num_stages), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for axes, shown, title in (
        (above, timeline, "measured"),
        (below, ideal, "if sends took no time"),
    ):
        begin = min(event.start for event in shown.events)
        for event in shown.events:
            kind = event.instruction.kind
            is_later = shown.placement.local_index(event.instruction.chunk) > 0
            start, length = (event.start - begin) * 1e3, (event.end - event.start) * 1e3
            if kind not in COMPUTATIONS:  # a line below what its receiver does
                axes.barh(event.stage + 0.47, length, 0.08, left=start, color=_TRANSFER)
                continue
            color = _COLORS[kind][is_later]
            axes.barh(event.stage, length, left=start, color=color, edgecolor="white")
            number = event.instruction.micro_batch
            axes.text(start + length / 2, event.stage, number, ha="center", va="center", color="w")
        axes.set_title(f"{title}: {shown.bubble:.1%} idle", loc="left", fontsize=10)
        axes.set_yticks(range(shown.num_stages), [f"stage {s}" for s in range(shown.num_stages)])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    below.set_xlabel("milliseconds")
    kinds = {event.instruction.kind for event in timeline.events}
    shown = {kind.replace("_", " "): own for kind, own in _COLORS.items() if kind in kinds}
    colors = {kind: color for kind, (color, _) in shown.items()}
    if timeline.placement.num_chunks > timeline.num_stages:
        colors.update({f"{kind}, later chunk": color for kind, (_, color) in shown.items()})
    colors["sent to the stage"] = _TRANSFER
    patches = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(colors), frameon=False)
    return figure
