"""Stop barrier: ranks stop together after a step that all agree on.

When a rank is asked to stop, rank 0 asks all to hold. From then on a rank waits at its next gate,
and answers how many it has passed; no rank can have passed more than one beyond another. The
greatest of the answers is the last gate that is passed, which all are told. There are gates for
each purpose: to leave the job, and to end a `fit`.
"""

import itertools
import threading
from collections.abc import Iterable


class StopBarrier:
    """The gates of this rank; the main thread passes them, another one holds and opens them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._passed, self._last, self._holds = 0, None, False

    def hold(self) -> int:
        """Let no gate be passed for now; return how many have been."""
        with self._changed:
            self._holds = True
            return self._passed

    def open_until(self, last: int) -> None:
        """Let gates be passed up to one, and none after."""
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def passes(self) -> bool:
        """Return whether this rank goes on, once that is known."""
        with self._changed:
            while self._holds and self._last is None:
                self._changed.wait(1.0)  # so that signals are seen
            if self._holds and self._passed >= self._last:
                return False
            self._passed += 1
            return True


class StopBarriers:
    """The `StopBarrier` of this rank for each purpose, a str."""

    def __init__(self):
        self._gates, self._numbers = {}, itertools.count()

    def new_purpose(self) -> str:
        """Return a purpose that is new, the same on ranks that call alike."""
        return f"number {next(self._numbers)}"

    def __getitem__(self, purpose: str) -> StopBarrier:
        return self._gates.setdefault(purpose, StopBarrier())  # a signal's handler calls it, too


class Agreement:
    """Rank 0's part: asks all ranks to hold, and tells the last gate.

    Args:
        ranks: the ranks of the job.
    """

    def __init__(self, ranks: Iterable[int]):
        self._missing, self._greatest = set(ranks), 0
        self.is_asked = self.is_settled = False

    def answer(self, rank: int, passed: int | None) -> int | None:
        """Take a rank's answer, None where it has left; return the last gate once it is known.

        Example:

        >>> agreement = Agreement([0, 1])
        >>> agreement.answer(1, 7)
        >>> agreement.answer(0, 6)
        7
        """
        self._missing.discard(rank)
        self._greatest = max(self._greatest, passed or 0)
        if self._missing or self.is_settled:
            return None
        self.is_settled = True
        return self._greatest
