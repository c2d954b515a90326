"""Verdict on a job from the heartbeats of its ranks.

Callers pass all times, so tests need no clock.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from dtransformer.parallel.watchdog.activity import Activity, describe_ranks, is_over, needs_others

_MAX_CHECK_INTERVAL = 5.0  # Seconds between two checks, above which this process was suspended.
SILENT_FRACTION = 0.5  # A rank has failed if it is silent for this fraction of `stall_seconds`.
_MAX_GROUPS = 4  # Maximum number of different activities in a verdict.
_SIMULTANEOUS_FRACTION = (
    0.8  # Fraction of that limit. Ranks that are silent for longer have the same cause.
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason why a job ends.

    Args:
        ranks: Tuple of the ranks at fault. Empty if unknown.
        cause: Clause that describes the failure, without the ranks.
        waits: Whether the ranks at fault report the error themselves. The other ranks then wait a
            moment before they end.
    """

    ranks: tuple[int, ...]
    cause: str
    waits: bool = False


@dataclasses.dataclass
class _Heartbeat:
    """Last heartbeat of a rank."""

    at: float
    activity: Activity = Activity()
    is_left: bool = False


class Watch:
    """Monitor of ranks that gives a verdict when one fails or the job stalls.

    Args:
        ranks: Iterable of the monitored ranks. Stalls are only detected with several ranks, which
            is the case on rank 0.
        stall_seconds: Time limit in seconds of a step.
        now: Current time in seconds.
    """

    def __init__(self, ranks: Iterable[int], stall_seconds: float, now: float):
        self._ranks = {rank: _Heartbeat(now) for rank in ranks}
        self._stall_seconds = stall_seconds
        self._last_check = now
        self._verdict = None

    def record_message(self, rank: int, now: float, activity: Activity | None = None) -> None:
        """Record a heartbeat of a rank, and its activity unless `None`."""
        self._ranks[rank].at = now
        if activity is not None:
            self._ranks[rank].activity = activity

    def record_exit(self, rank: int, error: str | None = None) -> None:
        """Record that a rank has left the job, normally or with an error."""
        self._ranks[rank].is_left = True
        if error is not None:
            last = self._ranks[rank].activity
            self._set_verdict(Verdict((rank,), f"failed in {last}: {error}", waits=True))

    def record_disconnect(self, rank: int, step: int = 0) -> None:
        """Record that a rank's connection closed without notice.

        Args:
            rank: Integer. The lost rank.
            step: Integer. Current step of this rank. It replaces the lost rank's last reported step
                if it is newer.
        """
        if not self._ranks[rank].is_left:
            last = self._ranks[rank].activity
            last = Activity("step", step) if step > last.step else last
            self._set_verdict(
                Verdict((rank,), f"ended in {last}: killed, out of memory, or crashed")
            )

    def verdict(self, now: float) -> Verdict | None:
        """Return the verdict if the job must end, and `None` otherwise. Call it every second."""
        late = now - self._last_check > _MAX_CHECK_INTERVAL
        self._last_check = now
        if late:  # This process was suspended and could not receive heartbeats.
            for heartbeat in self._ranks.values():
                heartbeat.at = now
        self._set_verdict(self._find_silent(now))
        self._set_verdict(self._find_stall(now))
        return self._verdict

    def local_seconds(self) -> dict[int, float]:
        """Return `Activity.local_seconds` of the ranks that have not left."""
        return {
            rank: heartbeat.activity.local_seconds for rank, heartbeat in self._present().items()
        }

    def _set_verdict(self, verdict):
        self._verdict = self._verdict or verdict

    def _present(self):
        return {rank: heartbeat for rank, heartbeat in self._ranks.items() if not heartbeat.is_left}

    def _find_silent(self, now):
        limit = SILENT_FRACTION * self._stall_seconds
        silent = {rank: now - heartbeat.at for rank, heartbeat in self._present().items()}
        if not silent or max(silent.values()) <= limit:
            return None
        ranks = tuple(
            rank for rank, seconds in silent.items() if seconds > _SIMULTANEOUS_FRACTION * limit
        )
        last = self._ranks[ranks[0]].activity
        seconds = max(silent.values())
        return Verdict(
            ranks,
            f"no heartbeat for {seconds:.0f} s, last in {last}: frozen or unreachable",
        )

    def _find_stall(self, now):
        present = self._present()
        if len(self._ranks) < 2 or not any(
            needs_others(heartbeat.activity) for heartbeat in present.values()
        ):
            return None
        for heartbeat in present.values():
            if not is_over(heartbeat.activity, now - heartbeat.at, self._stall_seconds):
                return None
        left = [rank for rank, heartbeat in self._ranks.items() if heartbeat.is_left]
        return stalled({rank: heartbeat.activity for rank, heartbeat in self._ranks.items()}, left)


def stalled(activities: dict[int, Activity], left: Sequence[int] = ()) -> Verdict:
    """Return the verdict on a job without progress: the ranks that lag behind, and their activity.

    Args:
        activities: Dict of the `Activity` of each rank.
        left: Sequence of the ranks that have left the job while others wait for them.

    Example:

    >>> step = Activity("step", 4, seconds=60)
    >>> stalled({0: step, 1: step, 2: Activity("callbacks", 3, seconds=600)}).ranks
    (2,)
    """
    ranks_by_activity = collections.defaultdict(list)  # Maps each activity to its ranks.
    for rank, activity in activities.items():
        ranks_by_activity[str(activity)].append(rank)
    seconds = min(
        activity.waited if activity.waits_in else activity.seconds
        for activity in activities.values()
    )
    newest = max(activity.step for activity in activities.values())
    behind = list(left) or [rank for rank, activity in activities.items() if activity.step < newest]
    if not behind and len(ranks_by_activity) == 1:
        (same,) = ranks_by_activity
        return Verdict(
            (), f"no rank made progress for {seconds:.0f} s in {same}: their calls differ"
        )
    if not behind and all(activity.waits_in for activity in activities.values()):
        groups = [
            f"{describe_ranks(ranks)} in {description}"
            for description, ranks in ranks_by_activity.items()
        ]
        ellipsis = "; …" if len(groups) > _MAX_GROUPS else ""
        return Verdict(
            (), f"ranks have waited for each other for {seconds:.0f} s, after an error that only "
            f"one of them caught or a call that only some of them make: "
            f"{'; '.join(groups[:_MAX_GROUPS])}{ellipsis}",
        )  # fmt: skip
    if not behind:  # All ranks are in the same step, most of them in the same activity.
        largest_group = max(ranks_by_activity.values(), key=len)
        behind = [rank for rank in activities if rank not in largest_group]
    first = activities[behind[0]]
    waiting_rank = next(r for r in activities if r not in behind)
    description = f"blocked the job for {seconds:.0f} s in {first}"
    if left:
        description = "left the job while others wait"
    return Verdict(
        tuple(behind), f"{description}: rank {waiting_rank} is in {activities[waiting_rank]}"
    )


def describe_verdict(verdict: Verdict, hosts: Sequence[str]) -> str:
    """Return a verdict as a clause that names ranks and hosts.

    Example:

    >>> describe_verdict(Verdict((1, 3), "ended in step 4"), ["a", "b", "a", "b"])
    'ranks 1, 3 on host b: ended in step 4'
    """
    if not verdict.ranks:
        return verdict.cause
    names = list(dict.fromkeys(hosts[rank] for rank in verdict.ranks))
    noun = "hosts" if len(names) > 1 else "host"
    ellipsis = ", …" if len(names) > 4 else ""
    places = f"{noun} {', '.join(names[:4])}{ellipsis}"
    return f"{describe_ranks(verdict.ranks)} on {places}: {verdict.cause}"


_MIN_RATIO = 1.5  # Minimum ratio to the median of the other ranks.
_MIN_DIFFERENCE = 0.01  # Minimum difference in seconds.
_MIN_CHECKS = 3  # Number of consecutive slow checks before a rank is reported.


class Stragglers:
    """Detector of ranks that need much longer than the others for data and callbacks."""

    def __init__(self):
        self._slow_checks = {}

    def check(self, local_seconds: Mapping[int, float]) -> tuple[int, float, float] | None:
        """Check for a slow rank and report it after three consecutive checks.

        A rank is slow if it takes at least 1.5 times the median of the other ranks.

        Args:
            local_seconds: Dict of the seconds between two steps by rank. 0 means unknown.

        Returns:
            A `(rank, seconds, median of the others)` tuple at the third consecutive check, and
            otherwise `None`.

        Example:

        >>> stragglers = Stragglers()
        >>> [stragglers.check({0: 0.2, 1: 0.2, 2: 0.4}) for _ in range(4)]
        [None, None, (2, 0.4, 0.2), None]
        """
        if len(local_seconds) < 2 or not all(local_seconds.values()):
            return None
        slowest = max(local_seconds, key=local_seconds.get)
        seconds = local_seconds[slowest]
        median = statistics.median(
            other_seconds for rank, other_seconds in local_seconds.items() if rank != slowest
        )
        if seconds < _MIN_RATIO * median or seconds < median + _MIN_DIFFERENCE:
            self._slow_checks.clear()
            return None
        self._slow_checks = {slowest: self._slow_checks.get(slowest, 0) + 1}
        return (slowest, seconds, median) if self._slow_checks[slowest] == _MIN_CHECKS else None
