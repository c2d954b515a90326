"""Activity tracker: what this rank does, as the library's own code says it."""

import collections
import contextlib
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

from dtransformer import _compat
from dtransformer.parallel.watchdog.activity import Activity, say_ranks

_COMPUTES = 0.03  # of a core: a process that takes less waits for others
_SECONDS_TO_GUESS = 5.0
_WITHOUT_GUESS = ("saving", "step")  # a disk takes no cores, and a step has a time of its own
_OF_THE_PROGRAM = ("outside", "callbacks")
_STEPS = 7  # of which the middle one tells how long a rank takes between two of them


class ActivityTracker:
    """Knows the activity of the thread that trains. `job.doing` tells it."""

    def __init__(self):
        self._begin = time.monotonic()
        self._kind, self._step, self._longest = "outside", 0, 0.0
        self._polling = set()  # a file for each thread that asks all the time what there is to do
        self._cpu_at = self._begin, self._computed()
        self._last_computed = self._begin
        self._own_seconds = collections.deque(maxlen=_STEPS)
        self._waits = {}  # number of a thread -> (since when, in what)
        self._has_own_functions = False  # of the program, with collectives
        self._call = (None, self._begin)  # of a function of TensorFlow, and since when

    @contextlib.contextmanager
    def polling_threads(self) -> Iterator[None]:
        """Say that threads which the `with` block starts compute nothing of this rank's own.

        Horovod's asks every millisecond what there is to send: that takes 6 to 25 % of a core.
        """
        before = _threads()
        yield
        self._polling |= _threads() - before

    @contextlib.contextmanager
    def doing(self, kind: str, step: int | None = None) -> Iterator[None]:
        """Say that the `with` block does something; within it another one may be said.

        Args:
            kind: one of `activity.KINDS`.
            step: number of the step; the last one by default.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # a thread that writes a checkpoint: others wait for it, or not
            return
        outer = self._kind
        self._enter(kind)
        self._step = self._step if step is None else step
        try:
            yield
            if self._kind == "step":
                self._longest = max(self._longest, time.monotonic() - self._begin)
        finally:
            self._enter(outer)

    def _enter(self, kind):
        self._kind, self._begin = kind, time.monotonic()

    @contextlib.contextmanager
    def waiting(self, collective: str, others: Sequence[int]) -> Iterator[None]:
        """Say that the `with` block waits for other ranks, in any thread.

        Args:
            collective: in what. Of waits within each other the outer one counts.
            others: for whom.
        """
        thread = threading.get_ident()
        if thread in self._waits:
            yield
            return
        self._waits[thread] = time.monotonic(), f"{collective} for {say_ranks(others)}"
        try:
            yield
        finally:
            del self._waits[thread]
            if thread == threading.main_thread().ident and self._kind != "step":
                self._begin = time.monotonic()  # the others have answered: it goes on

    def compiles(self) -> None:
        """Say that the step which is under way is traced and compiled."""
        if self._kind == "step":
            self._kind = "compiling"

    def traces_collective(self) -> None:
        """Say that the function which is traced has a collective."""
        if threading.get_ident() not in self._waits:  # else it is this library's, and watched
            self._has_own_functions |= self._kind in _OF_THE_PROGRAM

    def computed_for(self, seconds: float) -> None:
        """Say how long this rank has taken from a step's end to the next one's batch."""
        self._own_seconds.append(seconds)

    def activity(self) -> Activity:
        """Return what this rank does now. To be called about every second."""
        now = time.monotonic()
        before, cpu_before = self._cpu_at
        if now - before >= 0.5:
            self._cpu_at = now, self._computed()
            if self._cpu_at[1] - cpu_before >= _COMPUTES * (now - before):
                self._last_computed = now
        since, collective, is_guess = self._wait(now)
        return Activity(
            self._kind,
            self._step,
            now - self._begin,
            now - self._last_computed,
            self._longest,
            statistics.median(self._own_seconds.copy() or [0.0]),
            collective,
            now - since,
            is_guess,
        )

    def _computed(self):
        """Return the seconds that this process has computed, without what asks and watches."""
        return time.process_time() - time.thread_time() - sum(map(_seconds, self._polling))

    def _wait(self, now):
        """Return since when this rank waits, in what, and whether that is a guess."""
        main, waits = threading.main_thread().ident, self._waits.copy()
        if main in waits:
            return (*waits[main], False)
        if self._kind == "saving" and waits:  # for a thread that writes
            since, collective = min(waits.values())
            return max(since, self._begin), collective, False
        call = _compat.call_of_function(main)
        if call != self._call[0]:
            self._call = call, now
        # A function in which nothing is computed may wait in a collective that it has.
        since = max(self._call[1], self._last_computed)
        is_known = self._kind not in _OF_THE_PROGRAM or self._has_own_functions
        may_wait = call is not None and is_known and self._kind not in _WITHOUT_GUESS
        if not may_wait or now - since < _SECONDS_TO_GUESS:
            return now, "", False
        return since, f"a function of TensorFlow ({call[1]})", True


def _threads():
    """Return for each of this process' threads its file of scheduling figures (proc(5)), on Linux."""
    return set(pathlib.Path("/proc/self/task").glob("*/schedstat"))


def _seconds(schedstat):
    """Return the seconds that a thread has computed."""
    try:
        return int(schedstat.read_text().split()[0]) / 1e9
    except OSError:  # it has ended
        return 0.0
