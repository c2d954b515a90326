"""Parse lists of hosts, and exclude hosts that failed. Callers pass all times."""

import re
from collections.abc import Iterable

from dtransformer.errors import InputError, short_repr

# The format of horovodrun's host files and discovery scripts: "a slots=2", "a:2" or "a".
_LINE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots=(\d+)|:(\d+))?")
_MAX_SLOTS = 1024
_MAX_CONSECUTIVE_FAULTS = (
    2  # A host is excluded after it has failed this number of consecutive starts.
)


def parse_hosts(text: str, name: str) -> dict[str, int]:
    """Parse a list of hosts, one per line, into a dict from host names to numbers of ranks.

    Args:
        text: Lines of text. Empty lines and comments after "#" are ignored.
        name: Source of the text, for error messages.

    Raises:
        InputError: If a line is not a host, a host appears twice, or there is no host.

    Example:

    >>> parse_hosts("a slots=2\\nb:4  # the new one\\nc", "hosts.txt")
    {'a': 2, 'b': 4, 'c': 1}
    """
    hosts = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        slots = int(match[2] or match[3] or 1) if match else 0
        if not 0 < slots <= _MAX_SLOTS or match["host"] in hosts:
            raise InputError(
                f"{name}, line {line_number}: expected a host that appears only once, with its "
                f"slots, such as 'node1 slots=4', got {short_repr(line)}."
            )
        hosts[match["host"]] = slots
    if not hosts:
        raise InputError(f"{name} has no hosts. Add one per line, such as 'node1 slots=4'.")
    return hosts


class HostBook:
    """Record of failed hosts, which are excluded for a while.

    Args:
        cool_down: Float. Seconds to exclude a host.
    """

    def __init__(self, cool_down: float):
        self._cool_down = cool_down
        self._until = {}
        self._faults = {}

    def failed(self, host: str, now: float) -> None:
        """Exclude a host from the time `now` on, because it does not answer."""
        self._until[host] = now + self._cool_down
        self._faults.pop(host, None)

    def at_fault(self, hosts: Iterable[str], now: float) -> None:
        """Record the hosts whose ranks caused a failure. Exclude hosts that caused two in a row."""
        self._faults = {host: self._faults.get(host, 0) + 1 for host in hosts}
        for host in [
            host for host, times in self._faults.items() if times >= _MAX_CONSECUTIVE_FAULTS
        ]:
            self.failed(host, now)

    def usable(self, hosts: dict[str, int], now: float) -> dict[str, int]:
        """Return the hosts that are not excluded at the time `now`."""
        return {host: slots for host, slots in hosts.items() if self._until.get(host, now) <= now}


def take_ranks(hosts: dict[str, int], num_ranks: int | None) -> dict[str, int]:
    """Assign ranks to hosts in order.

    Args:
        hosts: Dict from host names to their maximum number of ranks.
        num_ranks: Integer. Total number of ranks to assign. `None` fills all hosts.

    Returns:
        Dict from host names to numbers of ranks, without unused hosts. Its sum is below `num_ranks`
        if the hosts do not suffice.

    Example:

    >>> take_ranks({"a": 2, "b": 4}, 3), take_ranks({"a": 2, "b": 4}, None)
    ({'a': 2, 'b': 1}, {'a': 2, 'b': 4})
    """
    assigned = {}
    remaining = sum(hosts.values()) if num_ranks is None else num_ranks
    for host, slots in hosts.items():
        if remaining > 0:
            assigned[host] = min(slots, remaining)
            remaining -= assigned[host]
    return assigned
