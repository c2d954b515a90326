"""The hosts of a job, and which of them are left out for a while: pure, times are given."""

import re
from collections.abc import Iterable

from dtransformer.errors import InputError, shown

# As horovodrun's host files and discovery scripts have them: "a slots=2", "a:2", "a".
_LINE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots=(\d+)|:(\d+))?")
_MAX_SLOTS = 1024
_TIMES = 2  # at fault in so many starts, one after the other, a host is left out


def parse_hosts(text: str, name: str) -> dict[str, int]:
    """Return {host: number of ranks that it takes} of lines of text.

    Args:
        text: the lines; empty ones and what comes after a "#" do not count.
        name: where they are from, for the error.

    Raises:
        InputError: a line is no host, or there is none.

    Example:

    >>> parse_hosts("a slots=2\\nb:4  # the new one\\nc", "hosts.txt")
    {'a': 2, 'b': 4, 'c': 1}
    """
    hosts = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        slots = int(found[2] or found[3] or 1) if found else 0
        if not 0 < slots <= _MAX_SLOTS or found["host"] in hosts:
            raise InputError(
                f"{name}: line {number} is {shown(line)}, expected a host that is there once, with "
                "its number of ranks, such as 'node1 slots=4'"
            )
        hosts[found["host"]] = slots
    if not hosts:
        raise InputError(f"{name}: has no host: give one a line, such as 'node1 slots=4'")
    return hosts


class HostBook:
    """Remembers which hosts have failed.

    Args:
        cool_down: seconds for which such a host is left out.
    """

    def __init__(self, cool_down: float):
        self._cool_down = cool_down
        self._until, self._faults = {}, {}

    def failed(self, host: str, now: float) -> None:
        """Leave a host out for a while: it does not answer."""
        self._until[host] = now + self._cool_down
        self._faults.pop(host, None)

    def at_fault(self, hosts: Iterable[str], now: float) -> None:
        """Count hosts whose ranks have ended a start; those that do so again are left out."""
        self._faults = {host: self._faults.get(host, 0) + 1 for host in hosts}
        for host in [host for host, times in self._faults.items() if times >= _TIMES]:
            self.failed(host, now)

    def usable(self, hosts: dict[str, int], now: float) -> dict[str, int]:
        """Return those hosts that are not left out."""
        return {host: slots for host, slots in hosts.items() if self._until.get(host, now) <= now}


def take_ranks(hosts: dict[str, int], num_ranks: int | None) -> dict[str, int]:
    """Return how many ranks each host gets, in order, until there are enough.

    Example:

    >>> take_ranks({"a": 2, "b": 4}, 3), take_ranks({"a": 2, "b": 4}, None)
    ({'a': 2, 'b': 1}, {'a': 2, 'b': 4})
    """
    taken, left = {}, sum(hosts.values()) if num_ranks is None else num_ranks
    for host, slots in hosts.items():
        if left > 0:
            taken[host] = min(slots, left)
            left -= taken[host]
    return taken
