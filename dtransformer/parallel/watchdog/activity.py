"""Activity of a rank, and how long it may take: pure."""

import dataclasses
from collections.abc import Sequence

# How many times `stall_seconds` an activity may take.
_PATIENCE = {
    "step": 1,  # forward, backward and update
    "compiling": 10,  # a step whose functions are traced and compiled
    "validating": 10,  # and predicting
    "saving": 10,
    "callbacks": 10,  # and all else between two steps of `fit`
    "outside": 10,  # of `fit`: what the program does is not known
}
KINDS = tuple(_PATIENCE)
# Those that end early where the rank does not even compute: then it waits for others.
_COMPUTES = ("compiling", "validating")
_FIRST = 40  # times, while the first step compiles: a GPU's driver may take half an hour for it
_TIMES_THE_LONGEST = 4  # what a step may take of the longest one before it
# Those in which ranks need no other rank, but where they say that they wait.
_ALONE = ("outside", "saving")
_MOST_LETTERS = 200  # of what a rank waits in

_SAYS = {
    "step": "step {step}",
    "compiling": "step {step}, which is compiled",
    "validating": "validation or prediction after step {step}",
    "saving": "saving after step {step}",
    "callbacks": "callbacks after step {step}",
    "outside": "no fit, after step {step}",
}


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a rank does, as its heartbeat tells.

    Args:
        kind: one of `KINDS`.
        step: number of the step that it is in, or was in last.
        seconds: for how long it has done that.
        idle_seconds: for how long the process has hardly computed.
        longest: seconds of the longest step so far that was not compiled.
        own_seconds: what this rank took of late between two steps, for data and callbacks.
        waits_in: the collective that it waits in meanwhile, and for whom; "" where it does not.
        waited: for how long it has waited there.
        is_guess: whether it may be something else: a function of TensorFlow that computes nothing.
    """

    kind: str = "outside"
    step: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    longest: float = 0.0
    own_seconds: float = 0.0
    waits_in: str = ""
    waited: float = 0.0
    is_guess: bool = False

    def __str__(self):
        waits = f", where it waits in {self.waits_in}" * bool(self.waits_in)
        return _SAYS[self.kind].format(step=self.step) + waits

    def as_json(self) -> dict:
        """Return the fields as JSON has them, which make the activity again."""
        return dataclasses.asdict(self) | {"waits_in": self.waits_in[:_MOST_LETTERS]}


def is_over(activity: Activity, later: float, stall_seconds: float) -> bool:
    """Return whether a rank has done something for longer than it may.

    Args:
        activity: what it does.
        later: seconds since it told that.
        stall_seconds: how long a step, or a wait for other ranks, may take.

    Example:

    >>> is_over(Activity("step", 3, seconds=45), 10, 50), is_over(Activity("saving", 3, 45), 10, 50)
    (True, False)
    """
    seconds = activity.seconds + later
    limit = stall_seconds * _PATIENCE[activity.kind]
    if activity.waits_in:
        seconds, limit = activity.waited + later, stall_seconds
    elif activity.kind in _COMPUTES and activity.idle_seconds + later > stall_seconds:
        limit = stall_seconds
    elif activity.kind == "compiling" and not activity.longest:
        limit = stall_seconds * _FIRST
    return seconds > max(limit, _TIMES_THE_LONGEST * activity.longest)


def needs_others(activity: Activity) -> bool:
    """Return whether a rank may be waiting for another one."""
    waits = activity.waits_in and not activity.is_guess
    return bool(waits) or activity.kind not in _ALONE


def say_ranks(ranks: Sequence[int]) -> str:
    """Return a text of a few ranks.

    Example:

    >>> say_ranks([3]), say_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}" + ", …" * (
        len(ranks) > 8
    )
