"""Run a program on several ranks, with a timeout."""

import os
import pathlib
import signal
import subprocess
import sys

HOROVODRUN = pathlib.Path(sys.executable).with_name("horovodrun")
REPOSITORY = pathlib.Path(__file__).parents[1]
_RUNNING = set()  # Processes that `launch` waits for.


def make_command(num_ranks, arguments):
    """Return the command for `python ARGUMENTS`, under horovodrun for several ranks."""
    command = [sys.executable, *map(str, arguments)]
    if num_ranks > 1:
        command = [str(HOROVODRUN), "--gloo", "-np", str(num_ranks), *command]
    return command


def launch(num_ranks, arguments, timeout=600, environment=None):
    """Run `python ARGUMENTS` on several ranks.

    Args:
        num_ranks: Number of ranks. A single rank does not need Horovod.
        arguments: List of arguments, converted with `str`.
        timeout: Seconds until all ranks are killed.
        environment: Dict of additional environment variables.

    Returns:
        A `subprocess.CompletedProcess` with `returncode`, `stdout` and `stderr`.

    Raises:
        TimeoutError: If the program does not end in time. The message contains its output.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = make_command(num_ranks, arguments)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
    )
    _RUNNING.add(process)
    try:
        texts = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        texts = process.communicate()
        raise TimeoutError(
            f"{' '.join(command)} did not end within {timeout} s.\n{tail(*texts)}"
        ) from None
    finally:
        _RUNNING.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def kill_launched():
    """Kill all programs that `launch` waits for in any thread, with their ranks."""
    for process in list(_RUNNING):
        os.killpg(process.pid, signal.SIGKILL)


def tail(stdout, stderr, length=8000):
    """Return the end of a program's output."""
    return f"{stdout[-length:]}\n{stderr[-length:]}"
