"""What this rank does, as the library's own code says it."""

import collections
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

from dtransformer.parallel.watchdog.activity import Activity

# Of a core: a process that takes less waits for others. Horovod's own thread takes 0.02 where ranks
# ask each other every 5 ms.
_COMPUTES = 0.05
_STEPS = 7  # of which the middle one tells how long a rank computes


class Recorder:
    """Knows the activity of the thread that trains. `dtransformer.parallel.job.doing` tells it."""

    def __init__(self):
        self._begin = time.monotonic()
        self._kind, self._step, self._longest = "outside", 0, 0.0
        self._cpu_at = self._begin, time.process_time()
        self._last_computed = self._begin
        self._own_seconds = collections.deque(maxlen=_STEPS)

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

    def compiles(self) -> None:
        """Say that the step which is under way is traced and compiled."""
        if self._kind == "step":
            self._kind = "compiling"

    def computed_for(self, seconds: float) -> None:
        """Say how long a step has taken until it needed the other ranks' gradients."""
        self._own_seconds.append(seconds)

    def activity(self) -> Activity:
        """Return what this rank does now. To be called about every second."""
        now, cpu = time.monotonic(), time.process_time()
        before, cpu_before = self._cpu_at
        if now - before >= 0.5:
            if cpu - cpu_before >= _COMPUTES * (now - before):
                self._last_computed = now
            self._cpu_at = now, cpu
        return Activity(
            self._kind,
            self._step,
            now - self._begin,
            now - self._last_computed,
            self._longest,
            statistics.median(self._own_seconds.copy() or [0.0]),
        )
