"""Stop barrier: ranks stop together after an agreed step.

When a rank is asked to stop, rank 0 asks all ranks to hold. From then on each rank waits at its
next gate and answers with the number of gates that it has passed. These counts differ by at most
one. The maximum is the last gate to pass, and rank 0 sends it to all ranks. Each purpose, leaving
the job or ending a `fit`, has separate gates.
"""

import itertools
import threading
from collections.abc import Iterable


class StopBarrier:
    """Gates of this rank for one purpose.

    The main thread passes the gates, and the watchdog thread holds and opens them.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._passed = 0
        self._last = None
        self._is_holding = False

    def hold(self) -> int:
        """Block the gates for now and return the number of gates passed so far."""
        with self._changed:
            self._is_holding = True
            return self._passed

    def open_until(self, last: int) -> None:
        """Open the gates up to the count `last` and block the ones after it."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def passes(self) -> bool:
        """Wait at the gate and return whether this rank continues."""
        with self._changed:
            while self._is_holding and self._last is None:
                self._changed.wait(1.0)  # The timeout lets Python handle signals.
            if self._is_holding and self._passed >= self._last:
                return False
            self._passed += 1
            return True


class StopBarriers:
    """`StopBarrier` objects of this rank by purpose, a string."""

    def __init__(self):
        self._gates = {}
        self._counter = itertools.count()

    def new_purpose(self) -> str:
        """Return a new purpose, identical on ranks that make the same calls."""
        return f"number {next(self._counter)}"

    def __getitem__(self, purpose: str) -> StopBarrier:
        return self._gates.setdefault(
            purpose, StopBarrier()
        )  # `setdefault` is safe in signal handlers, which also call this.


class Agreement:
    """Agreement on the last gate, computed by rank 0.

    Args:
        ranks: Iterable of the ranks of the job.
    """

    def __init__(self, ranks: Iterable[int]):
        self._missing = set(ranks)
        self._max_passed = 0
        self.is_asked = self.is_settled = False

    def answer(self, rank: int, passed: int | None) -> int | None:
        """Record a rank's answer and return the last gate once all ranks have answered.

        Args:
            rank: Integer. The rank that answers.
            passed: Number of gates passed, or `None` if the rank has left.

        Returns:
            The maximum number of passed gates with the last missing answer, and otherwise `None`.

        Example:

        >>> agreement = Agreement([0, 1])
        >>> agreement.answer(1, 7)
        >>> agreement.answer(0, 6)
        7
        """
        self._missing.discard(rank)
        self._max_passed = max(self._max_passed, passed or 0)
        if self._missing or self.is_settled:
            return None
        self.is_settled = True
        return self._max_passed
