"""Which rank holds up the others, though it goes on: pure."""

import statistics
from collections.abc import Mapping

_TIMES = 1.5  # as long as the others
_LEAST = 0.01  # seconds more
_LOOKS = 3  # one after the other, before it is told


class Stragglers:
    """Looks at how long each rank takes between two steps, for its data and callbacks."""

    def __init__(self):
        self._looks = {}

    def look(self, own_seconds: Mapping[int, float]) -> tuple[int, float, float] | None:
        """Look once more; return a rank that is slow, its seconds and the others', the first time.

        Args:
            own_seconds: seconds between two steps by rank; 0 where they are not known.

        Example:

        >>> stragglers = Stragglers()
        >>> [stragglers.look({0: 0.2, 1: 0.2, 2: 0.4}) for _ in range(4)]
        [None, None, (2, 0.4, 0.2), None]
        """
        if len(own_seconds) < 2 or not all(own_seconds.values()):
            return None
        slowest = max(own_seconds, key=own_seconds.get)
        own = own_seconds[slowest]
        others = statistics.median(one for rank, one in own_seconds.items() if rank != slowest)
        if own < _TIMES * others or own < others + _LEAST:
            self._looks.clear()
            return None
        self._looks = {slowest: self._looks.get(slowest, 0) + 1}
        return (slowest, own, others) if self._looks[slowest] == _LOOKS else None
