"""The end of a rank that cannot go on: what it says, and how it leaves."""

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Callable

from dtransformer.errors import one_line
from dtransformer.parallel.watchdog.activity import Activity

_SECONDS_TO_WRITE = 3.0  # after which a standard error that nobody reads is given up
_AT_ONCE = 0.01


def write_stacks(rank: int, message: str) -> str:
    """Write where all threads are to a new file that only this user can read.

    Args:
        rank: this rank.
        told: the verdict, for its first line.

    Returns:
        The file's path; or why there is none.
    """
    try:
        handle, path = tempfile.mkstemp(f"-rank-{rank}.stacks", "dtransformer-")
        with os.fdopen(handle, "w") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return f"not written ({error.strerror})"
    return path


def last_words(message: str, rank: int, host: str, own: Activity, stacks: str) -> str:
    """Return the line that a rank ends with.

    Args:
        told: the verdict, as `watch.say` has it.
        rank, host: this rank, and its host.
        own: what it did.
        stacks: the file with its stacks.
    """
    text = f"rank {rank} on host {host} was in {own}"
    return one_line(f"dtransformer: the job ends: {message}; {text}; all threads: {stacks}", 1000)


def leave(words: str, seconds: float) -> None:
    """Print a line and end this process, whatever its other threads are doing and hold.

    Args:
        words: the line.
        seconds: to wait in between, so that the other ranks can say theirs.
    """
    _exit_in(seconds + 3 * _SECONDS_TO_WRITE)  # whatever comes
    _within(_SECONDS_TO_WRITE, lambda: os.write(2, f"{words}\n".encode()))
    _within(_SECONDS_TO_WRITE, lambda: (sys.stdout.flush(), sys.stderr.flush()))
    _exit_in(max(seconds, _AT_ONCE))


def end_unless_again(seconds: float) -> None:
    """End this process after some seconds, unless this is called again before.

    This needs nothing of Python: where the main thread waits in C++ and holds the interpreter's
    lock, no other thread of Python runs. All stacks are printed on standard error.
    """
    with contextlib.suppress(
        ValueError, OSError, AttributeError
    ):  # of a standard error that is none
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def go_on() -> None:
    """Take back `end_unless_again`."""
    faulthandler.cancel_dump_traceback_later()


def _exit_in(seconds):
    """End this process with code 1, from a thread that needs nothing of Python."""
    nowhere = os.open(os.devnull, os.O_WRONLY)  # the stacks are written already
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _within(seconds: float, action: Callable) -> None:
    """Do something that may block, and wait for it at most so long."""

    def run():
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
