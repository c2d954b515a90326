"""Activity of a rank and its time limits, without side effects."""

import dataclasses
from collections.abc import Sequence

# Time limit of each activity, as a multiple of `stall_seconds`.
_PATIENCE = {
    "step": 1,  # Forward, backward and update.
    "compiling": 10,  # A step whose functions are traced and compiled.
    "validating": 10,  # Also prediction.
    "saving": 10,
    "callbacks": 10,  # Also everything else between two steps of `fit`.
    "outside": 10,  # The program runs unknown code outside of `fit`.
}
KINDS = tuple(_PATIENCE)
# These activities end early if the process is idle, because it then waits for other ranks.
_COMPUTING = ("compiling", "validating")
_FIRST_STEP_PATIENCE = (
    40  # Multiple for the first step. A GPU driver may need half an hour to compile it.
)
_LONGEST_STEP_FACTOR = 4  # Limit of a step as a multiple of the longest previous step.
# Activities that need no other rank, unless a wait is reported.
_INDEPENDENT = ("outside", "saving")
_MAX_WAIT_LENGTH = 200  # Maximum length of the name of a wait in a heartbeat.

_DESCRIPTIONS = {
    "step": "step {step}",
    "compiling": "step {step} (compiling)",
    "validating": "validation or prediction after step {step}",
    "saving": "saving after step {step}",
    "callbacks": "callbacks after step {step}",
    "outside": "code outside of fit, after step {step}",
}


@dataclasses.dataclass(frozen=True)
class Activity:
    """Current activity of a rank, as reported in its heartbeat.

    Args:
        kind: String from `KINDS`.
        step: Integer. Current step, or the last one.
        seconds: Duration of the activity so far.
        idle_seconds: Time since the process last used a noticeable amount of CPU time.
        longest: Duration in seconds of the longest step so far that was not compiled.
        local_seconds: Recent time in seconds for data and callbacks between two steps of this rank.
        waits_in: Description of the collective that the rank waits in and of the awaited ranks, or
            `""` if it does not wait.
        waited: Duration of the wait in seconds.
        is_guess: Whether the wait is inferred from a TensorFlow function that uses no CPU time.
    """

    kind: str = "outside"
    step: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    longest: float = 0.0
    local_seconds: float = 0.0
    waits_in: str = ""
    waited: float = 0.0
    is_guess: bool = False

    def __str__(self):
        waits = f", waiting in {self.waits_in}" if self.waits_in else ""
        return _DESCRIPTIONS[self.kind].format(step=self.step) + waits

    def as_json(self) -> dict:
        """Return the fields as a JSON dict for `Activity(**fields)`."""
        return dataclasses.asdict(self) | {"waits_in": self.waits_in[:_MAX_WAIT_LENGTH]}


def is_over(activity: Activity, later: float, stall_seconds: float) -> bool:
    """Return whether a rank has exceeded the time limit of its activity.

    Waits are limited to `stall_seconds`, other activities to a multiple of it. The limit is at
    least four times the longest previous step.

    Args:
        activity: Last reported `Activity`.
        later: Seconds since the report.
        stall_seconds: Time limit in seconds of a step, or of a wait for other ranks.

    Example:

    >>> is_over(Activity("step", 3, seconds=45), 10, 50), is_over(Activity("saving", 3, 45), 10, 50)
    (True, False)
    """
    seconds = activity.seconds + later
    limit = stall_seconds * _PATIENCE[activity.kind]
    if activity.waits_in:
        seconds = activity.waited + later
        limit = stall_seconds
    elif activity.kind in _COMPUTING and activity.idle_seconds + later > stall_seconds:
        limit = stall_seconds
    elif activity.kind == "compiling" and not activity.longest:
        limit = stall_seconds * _FIRST_STEP_PATIENCE
    return seconds > max(limit, _LONGEST_STEP_FACTOR * activity.longest)


def needs_others(activity: Activity) -> bool:
    """Return whether a rank may be waiting for another one.

    This is the case if it reports a wait that is not a guess, or for all activities except saving
    and code outside of `fit`.
    """
    waits = activity.waits_in and not activity.is_guess
    return bool(waits) or activity.kind not in _INDEPENDENT


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a description of at most eight ranks.

    Example:

    >>> describe_ranks([3]), describe_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    noun = "ranks" if len(ranks) > 1 else "rank"
    ellipsis = ", …" if len(ranks) > 8 else ""
    return f"{noun} {', '.join(map(str, ranks[:8]))}{ellipsis}"
