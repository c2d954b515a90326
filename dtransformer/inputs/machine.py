"""Resources of this machine."""

import os
import pathlib
import resource

_MEMORY = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
_UNKNOWN = 2**40


def free_memory() -> int:
    """Return the bytes of memory that this process may still take.

    They are the least of what is free on the machine, what the container's limit leaves, and the
    process' own limit.
    """
    return min(_free_on_machine(), _free_in_container(), _own_limit())


def _free_on_machine():
    try:
        lines = _MEMORY.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):  # another system
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNKNOWN


def _free_in_container():
    try:
        limit, used = ((_GROUP / name).read_text() for name in ("memory.max", "memory.current"))
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # none, or "max"
        return _UNKNOWN


def _own_limit():
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _UNKNOWN if limit == resource.RLIM_INFINITY else limit
