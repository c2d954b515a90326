"""The watchdog thread: exchanges heartbeats and ends this rank after a verdict.

Before it ends the process, it writes the stacks of all threads and prints the cause.
"""

import collections
import contextlib
import faulthandler
import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from dtransformer.errors import to_one_line
from dtransformer.parallel.watchdog.activity import Activity
from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker
from dtransformer.parallel.watchdog.links import End
from dtransformer.parallel.watchdog.stop_barrier import Agreement, StopBarriers
from dtransformer.parallel.watchdog.watch import Stragglers, Verdict, Watch, describe_verdict

_HEARTBEAT_SECONDS = 1.0  # Seconds between two heartbeats.
_VERDICT_DELAY = 2.0  # Seconds before this rank exits, so that the others receive the verdict.
_FAILED_RANK_DELAY = 5.0  # Seconds for a failed rank to print an error.


_SECONDS_TO_WRITE = 3.0  # Time limit for writes to a standard error that nobody reads.
_MIN_DELAY = 0.01


def write_stacks(rank: int, message: str) -> str:
    """Write the stacks of all threads to a new file that only this user can read.

    Args:
        rank: Integer. This rank.
        message: String. The verdict, written to the first line.

    Returns:
        The path of the file, or the reason why it was not written.
    """
    try:
        handle, path = tempfile.mkstemp(f"-rank-{rank}.stacks", "dtransformer-")
        with os.fdopen(handle, "w") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return f"not written ({error.strerror})"
    return path


def final_message(message: str, rank: int, host: str, activity: Activity, stacks: str) -> str:
    """Return the line that a rank prints before it ends.

    Args:
        message: String. Result of `watch.describe_verdict`.
        rank: Integer. This rank.
        host: String. Host of this rank.
        activity: `Activity` of this rank.
        stacks: String. Result of `write_stacks`.
    """
    text = f"rank {rank} on host {host} was in {activity}"
    return to_one_line(
        f"dtransformer: the job ends: {message}; {text}; all threads: {stacks}", 1000
    )


def leave(line: str, seconds: float) -> None:
    """Print a line and end this process with code 1, even if other threads block.

    Args:
        line: String. The line.
        seconds: Time to wait before the exit, so that the other ranks can print their lines.
    """
    _exit_in(seconds + 3 * _SECONDS_TO_WRITE)  # Exit even if the writes below block.
    _run_with_timeout(lambda: os.write(2, f"{line}\n".encode()))
    _run_with_timeout(lambda: (sys.stdout.flush(), sys.stderr.flush()))
    _exit_in(max(seconds, _MIN_DELAY))


def schedule_exit(seconds: float) -> None:
    """End this process after some seconds, unless this function is called again before.

    The timer needs no Python thread. It works even if the main thread waits in C++ and keeps the
    interpreter lock. It prints all stacks on standard error.
    """
    with contextlib.suppress(
        ValueError, OSError, AttributeError
    ):  # Standard error may be missing or invalid.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def cancel_exit() -> None:
    """Cancel the timer of `schedule_exit`."""
    faulthandler.cancel_dump_traceback_later()


def _exit_in(seconds):
    """End this process with code 1 after some seconds, without the help of Python threads."""
    nowhere = os.open(os.devnull, os.O_WRONLY)  # The stacks are already in the file.
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _run_with_timeout(action: Callable) -> None:
    """Run an action that may block in a thread, and wait for at most `_SECONDS_TO_WRITE`."""

    def run():
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_WRITE)


class Watchdog:
    """Thread that monitors the job.

    Args:
        rank: Integer. This rank.
        hosts: Sequence of host names, one per rank.
        link: `End` of this rank: a `Hub` on rank 0, a `Member` elsewhere.
        stall_seconds: Time limit in seconds of a step.
        recorder: `ActivityTracker` of this rank.
        gates: `StopBarriers` of this rank.
        end: Function that ends this process, called with the last line and the seconds to wait.
            Defaults to `leave`.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        link: End,
        stall_seconds: float,
        recorder: ActivityTracker,
        gates: StopBarriers,
        end: Callable[[str, float], None] = leave,
    ):
        faulthandler.enable(2)  # Print the stacks if the process crashes outside of Python.
        self.rank = rank
        self.hosts = hosts
        self.stall_seconds = stall_seconds
        self._link = link
        self._recorder = recorder
        self._gates = gates
        self._end = end
        ranks = range(len(hosts))
        self._watch = Watch(ranks if rank == 0 else [0], stall_seconds, time.monotonic())
        self._present = set(ranks)
        self._stragglers = Stragglers()
        self._agreements = collections.defaultdict(lambda: Agreement(self._present))
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._link.selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._requests = []  # Values that the main thread wants to send.
        self._is_leaving = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="dtransformer-watchdog", daemon=True)
        self._thread.start()

    # The main thread calls the following methods.

    def ask_to_stop(self, purpose: str) -> None:
        """Ask all ranks to stop at the same gate. Signal handlers may call this."""
        self._request({"stop": purpose})

    def leave(self, error: str | None = None) -> None:
        """Announce to the other ranks that this rank leaves, with the error that ends it."""
        self._request({"left": True, "error": error})
        self._thread.join(2 * _HEARTBEAT_SECONDS)

    def _request(self, value):
        self._requests.append(value)
        with contextlib.suppress(OSError):
            self._wake_sender.send(b".")

    # The methods below run in the watchdog thread.

    def _run(self):
        try:
            self._watch_until_left()
        except Exception as error:  # An error in the watchdog is no reason to end a job that works.
            with contextlib.suppress(Exception):
                print(f"dtransformer: The watchdog failed: {error!r}.", file=sys.stderr)
                self._handle_request({"left": True, "error": None})
        if self._end is leave and not self._has_ended:
            cancel_exit()
        self._link.close()

    def _watch_until_left(self):
        # False in tests, which replace `end`.
        next_beat = 0.0
        is_process = self._end is leave
        while not self._is_leaving:
            now = time.monotonic()
            if now >= next_beat:
                if is_process:
                    schedule_exit(self.stall_seconds)
                self._send_heartbeat(now)
                next_beat = now + _HEARTBEAT_SECONDS
            for rank, message in self._link.receive(max(next_beat - time.monotonic(), 0.0)):
                self._handle_message(rank, message)
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
            while self._requests:
                self._handle_request(self._requests.pop(0))

    def _send_heartbeat(self, now):
        activity = self._recorder.activity()
        if self.rank == 0:
            self._watch.record_message(0, now, activity)
        verdict = self._watch.verdict(now)
        if verdict is not None:
            self._execute_verdict(verdict)
            return
        if self.rank == 0:
            self._report_straggler()
        self._send_to_others({"beat": activity.as_json()})

    def _report_straggler(self):
        slow = self._stragglers.check(self._watch.local_seconds())
        if slow is not None:
            rank, seconds, other_seconds = slow
            print(
                f"dtransformer: rank {rank} on host {self.hosts[rank]} slows down the job: data "
                f"and callbacks take {seconds:.3f} s between two steps, compared with "
                f"{other_seconds:.3f} s on the other ranks.",
                file=sys.stderr,
            )

    def _handle_message(self, rank, message):
        if message is None:
            self._watch.record_disconnect(rank, self._recorder.activity().step)
            self._record_absence(rank)
            self._send_heartbeat(time.monotonic())
            return
        self._watch.record_message(rank, time.monotonic())
        if "beat" in message:
            self._watch.record_message(rank, time.monotonic(), Activity(**message["beat"]))
        if "left" in message:
            self._watch.record_exit(rank, message["error"])
            self._record_absence(rank)
        if "verdict" in message:
            verdict = message["verdict"]
            self._execute_verdict(Verdict(tuple(verdict[0]), verdict[1], verdict[2]))
        if "stop" in message:
            self._start_stop(message["stop"])
        if "hold" in message:
            purpose = message["hold"]
            self._link.send(0, {"passed": [purpose, self._gates[purpose].hold()]})
        if "passed" in message:
            self._answer(rank, *message["passed"])
        if "last_gate" in message:
            purpose, last = message["last_gate"]
            self._gates[purpose].open_until(last)

    def _handle_request(self, request):
        if "stop" in request:
            if self.rank == 0:
                self._start_stop(request["stop"])
            else:
                self._link.send(0, request)
            return
        self._send_to_others({"beat": self._recorder.activity().as_json(), **request})
        self._is_leaving = True

    def _start_stop(self, purpose):
        if not self._agreements[purpose].is_asked:
            self._agreements[purpose].is_asked = True
            self._send_to_others({"hold": purpose})
            self._answer(0, purpose, self._gates[purpose].hold())

    def _answer(self, rank, purpose, passed):
        last = self._agreements[purpose].answer(rank, passed)
        if last is not None and self._agreements[purpose].is_asked:
            self._send_to_others({"last_gate": [purpose, last]})
            self._gates[purpose].open_until(last)

    def _record_absence(self, rank):
        """Record that a rank passes no more gates."""
        self._present.discard(rank)
        for purpose in list(self._agreements):
            self._answer(rank, purpose, None)

    def _send_to_others(self, value):
        for rank in range(1, len(self.hosts)) if self.rank == 0 else [0]:
            self._link.send(rank, value)

    def _execute_verdict(self, verdict):
        """Send the verdict to the other ranks and end this process."""
        if self._is_leaving:
            return
        if self.rank == 0:
            self._send_to_others({"verdict": [verdict.ranks, verdict.cause, verdict.waits]})
        if verdict.waits:  # Give the failed rank and horovodrun time to report the error.
            end = time.monotonic() + _FAILED_RANK_DELAY
            while time.monotonic() < end and not self._requests:
                time.sleep(0.1)
            if self._requests:
                self._is_leaving = True
                return
        message = describe_verdict(verdict, self.hosts)
        activity = self._recorder.activity()
        stacks = write_stacks(self.rank, message)
        line = final_message(message, self.rank, self.hosts[self.rank], activity, stacks)
        self._has_ended = True
        self._end(line, _VERDICT_DELAY)
        self._is_leaving = True  # Only reached in tests, where `end` returns.
