"""Activity tracker: records the activity of this rank as reported by the library's code."""

import collections
import contextlib
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

from dtransformer import _compat
from dtransformer.parallel.watchdog.activity import Activity, describe_ranks

_MIN_CPU_FRACTION = 0.03  # Fraction of a core. A process below it is idle.
_MIN_GUESS_SECONDS = 5.0
_NEVER_GUESSED = ("saving", "step")  # Disks use no cores, and steps have a separate limit.
_USER_ACTIVITIES = ("outside", "callbacks")
_NUM_INTERVALS = 7  # Number of steps of the median time between two steps.


class ActivityTracker:
    """Tracker for the activity of the training thread. `job.record_activity` updates it."""

    def __init__(self):
        self._start = time.monotonic()
        self._kind = "outside"
        self._step = 0
        self._longest = 0.0
        self._polling = set()  # Files in /proc of threads that poll for work.
        self._last_cpu_sample = self._start, self._cpu_seconds()
        self._last_computed = self._start
        self._own_seconds = collections.deque(maxlen=_NUM_INTERVALS)
        self._waits = {}  # Maps a thread id to the start time and the description of its wait.
        self._has_user_collectives = False  # Whether the user's functions contain collectives.
        self._call = (
            None,
            self._start,
        )  # Current call of a TensorFlow function and its start time.

    @contextlib.contextmanager
    def polling_threads(self) -> Iterator[None]:
        """Exclude threads that start in the `with` block from the CPU time of this rank.

        Horovod's thread polls for work every millisecond, which takes 6 to 25 % of a core.
        """
        before = _threads()
        yield
        self._polling |= _threads() - before

    @contextlib.contextmanager
    def record_activity(self, kind: str, step: int | None = None) -> Iterator[None]:
        """Record the activity of the `with` block. Blocks can be nested.

        Args:
            kind: String from `activity.KINDS`.
            step: Integer. Current step. Defaults to the last one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Other ranks may or may not wait for a thread that writes a checkpoint.
            return
        outer = self._kind
        self._enter(kind)
        self._step = self._step if step is None else step
        try:
            yield
            if self._kind == "step":
                self._longest = max(self._longest, time.monotonic() - self._start)
        finally:
            self._enter(outer)

    def _enter(self, kind):
        self._kind = kind
        self._start = time.monotonic()

    @contextlib.contextmanager
    def record_wait(self, collective: str, ranks: Sequence[int]) -> Iterator[None]:
        """Record that the `with` block waits for other ranks, in any thread.

        Args:
            collective: Description of the collective. Nested waits keep the outer one.
            ranks: Sequence of the awaited ranks.
        """
        thread = threading.get_ident()
        if thread in self._waits:
            yield
            return
        self._waits[thread] = time.monotonic(), f"{collective} for {describe_ranks(ranks)}"
        try:
            yield
        finally:
            del self._waits[thread]
            if thread == threading.main_thread().ident and self._kind != "step":
                self._start = (
                    time.monotonic()
                )  # The other ranks have answered, so the activity starts again.

    def record_compilation(self) -> None:
        """Record that the current step is being traced and compiled."""
        if self._kind == "step":
            self._kind = "compiling"

    def traces_collective(self) -> None:
        """Record that the function being traced contains a collective."""
        if (
            threading.get_ident() not in self._waits
        ):  # The library's functions run within a recorded wait.
            self._has_user_collectives |= self._kind in _USER_ACTIVITIES

    def record_local_seconds(self, seconds: float) -> None:
        """Record the time in seconds between the end of a step and the next batch on this rank."""
        self._own_seconds.append(seconds)

    def activity(self) -> Activity:
        """Return the current activity of this rank. Call it about every second."""
        now = time.monotonic()
        before, cpu_before = self._last_cpu_sample
        if now - before >= 0.5:
            self._last_cpu_sample = now, self._cpu_seconds()
            if self._last_cpu_sample[1] - cpu_before >= _MIN_CPU_FRACTION * (now - before):
                self._last_computed = now
        since, collective, is_guess = self._find_wait(now)
        return Activity(
            self._kind,
            self._step,
            now - self._start,
            now - self._last_computed,
            self._longest,
            statistics.median(self._own_seconds.copy() or [0.0]),
            collective,
            now - since,
            is_guess,
        )

    def _cpu_seconds(self):
        """Return the CPU seconds of this process without polling threads and the calling thread."""
        return (
            time.process_time() - time.thread_time() - sum(map(_thread_cpu_seconds, self._polling))
        )

    def _find_wait(self, now):
        """Return the start time of this rank's wait, its description, and whether it is a guess."""
        main = threading.main_thread().ident
        waits = self._waits.copy()
        if main in waits:
            return (*waits[main], False)
        if self._kind == "saving" and waits:  # The main thread waits for a thread that writes.
            since, collective = min(waits.values())
            return max(since, self._start), collective, False
        call = _compat.current_function_call(threading.main_thread())
        if call != self._call[0]:
            self._call = call, now
        # A function that uses no CPU time may be waiting in one of its collectives.
        since = max(self._call[1], self._last_computed)
        is_known = self._kind not in _USER_ACTIVITIES or self._has_user_collectives
        may_wait = call is not None and is_known and self._kind not in _NEVER_GUESSED
        if not may_wait or now - since < _MIN_GUESS_SECONDS:
            return now, "", False
        return since, f"a TensorFlow function ({call[1]})", True


def _threads():
    """Return the scheduling statistics files (see proc(5)) of this process' threads."""
    return set(pathlib.Path("/proc/self/task").glob("*/schedstat"))


def _thread_cpu_seconds(schedstat):
    """Return the CPU seconds of a thread."""
    try:
        return int(schedstat.read_text().split()[0]) / 1e9
    except OSError:  # The thread has ended.
        return 0.0
