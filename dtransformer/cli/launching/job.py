"""The processes that the launcher starts on this host: ranks, or horovodrun."""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dtransformer.errors import raise_as_input_error

TRACEBACK = "Traceback (most recent call last)"
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05
_SECONDS_TO_END = 5.0
_SECONDS_TO_READ = 1.0


def horovod_variables(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank of a job on this host.

    Start the server where the ranks find each other. It accepts connections of this host only.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((_LOOPBACK, 0), RendezvousHandler, False)
    server.daemon_threads = True
    ranks = get_host_assignments([HostInfo("localhost", num_ranks)], num_ranks)
    server.init(ranks)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shared = create_run_env_vars(_LOOPBACK, ["lo"], str(server.server_port))
    return [{**shared, **create_slot_env_vars(rank)} for rank in ranks]


class Job:
    """Processes of one command that start together and end together.

    Each starts a new session, so that Ctrl-C reaches only the launcher. The first process shares
    the launcher's standard input. The others have none.

    Args:
        command: Program and arguments.
        environments: Environment variables of each process.

    Raises:
        InputError: If the program cannot be started.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]):
        self._kill_at = math.inf
        self._processes = []
        for environment in environments:
            with raise_as_input_error("the command after --", OSError):
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if self._processes else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env={**environment, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                )
            self._processes.append(process)

    def kill_in(self, seconds: float) -> None:
        """Kill the processes that still run after `seconds` seconds."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def end(self, signal_number: int) -> None:
        """Send the signal `signal_number` to all processes.

        Kill processes that still run after 5 seconds.
        """
        self.kill_in(_SECONDS_TO_END)
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)

    def wait(self, show: Callable[[int, str, bool], object]) -> tuple[int, int]:
        """Wait until all processes have ended. If one fails, end the others.

        Args:
            show: Function `(index, text, is_error)`, called from threads with each line of
                output. The lines of a traceback come in one call.

        Returns:
            A `(index, code)` tuple: the process that failed first, and its exit code as
            `subprocess.Popen` reports it. `(0, 0)` if none failed.
        """
        readers = []
        for index, process in enumerate(self._processes):
            for stream in (process.stdout, process.stderr):
                arguments = show, index, stream, stream is process.stderr
                readers.append(threading.Thread(target=_read, args=arguments, daemon=True))
                readers[-1].start()
        failure = 0, 0
        codes = [None]
        while None in codes:
            time.sleep(_POLL_SECONDS)
            codes = [process.poll() for process in self._processes]
            failures = [(index, code) for index, code in enumerate(codes) if code]
            if failures and failure == (0, 0):
                failure = failures[0]
                if self._kill_at == math.inf:
                    self.end(signal.SIGTERM)
            if time.monotonic() > self._kill_at:
                self.end(signal.SIGKILL)
        for reader in readers:  # A daemon of a rank may keep the pipes open.
            reader.join(_SECONDS_TO_READ)
        return failure


def _read(show, index, stream: Iterable[str], is_error):
    traceback = ""
    for line in stream:
        if line.startswith(TRACEBACK) or (traceback and line.startswith(" ")):
            traceback += line
            continue
        show(index, traceback + line, is_error)
        traceback = ""
    if traceback:
        show(index, traceback, is_error)
