"""Activity tracker: what this rank does, as the library's own code says it."""

import collections
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

from dtransformer import _compat
from dtransformer.parallel.watchdog.activity import Activity, say_ranks

# Of a core: a process that takes less waits for others. Horovod's own thread takes 0.1 ms each time
# that it asks what there is to send.
_COMPUTES, _COMPUTES_TO_ASK = 0.03, 0.1e-3
_SECONDS_TO_GUESS = 5.0
_WITHOUT_GUESS = ("saving", "step")  # a disk takes no cores, and a step has a time of its own
_OF_THE_PROGRAM = ("outside", "callbacks")
_STEPS = 7  # of which the middle one tells how long a rank takes between two of them


class ActivityTracker:
    """Knows the activity of the thread that trains. `job.doing` tells it."""

    def __init__(self):
        self._begin = time.monotonic()
        self._kind, self._step, self._longest = "outside", 0, 0.0
        self._cpu_at = self._begin, time.process_time()
        self._last_computed = self._begin
        self._own_seconds = collections.deque(maxlen=_STEPS)
        self._waits = {}  # number of a thread -> (since when, in what)
        self._has_own_functions = False  # of the program, with collectives
        self._call = (None, self._begin)  # of a function of TensorFlow, and since when
        asks_every = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1000
        self._computes = _COMPUTES + _COMPUTES_TO_ASK / max(asks_every, 1e-3)

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
        now, cpu = time.monotonic(), time.process_time()
        before, cpu_before = self._cpu_at
        if now - before >= 0.5:
            if cpu - cpu_before >= self._computes * (now - before):
                self._last_computed = now
            self._cpu_at = now, cpu
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
