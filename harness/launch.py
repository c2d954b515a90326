"""Starts a program on several ranks, bounded in time."""

import os
import pathlib
import signal
import subprocess
import sys

HOROVODRUN = pathlib.Path(sys.executable).with_name("horovodrun")
REPOSITORY = pathlib.Path(__file__).parents[1]


def command_of(num_ranks, arguments):
    """Return the command that runs `python ARGUMENTS`, on several ranks under horovodrun."""
    command = [sys.executable, *map(str, arguments)]
    if num_ranks > 1:
        command = [str(HOROVODRUN), "--gloo", "-np", str(num_ranks), *command]
    return command


def launch(num_ranks, arguments, timeout=600, environment=None):
    """Run `python ARGUMENTS` on several ranks.

    Args:
        num_ranks: number of ranks; for 1 Horovod is not needed.
        arguments: list of str.
        timeout: seconds, after which all ranks are ended.
        environment: dict of additional environment variables.

    Returns:
        A `subprocess.CompletedProcess`: its `returncode`, `stdout` and `stderr`.

    Raises:
        TimeoutError: the program did not end in time; with what it printed.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = command_of(num_ranks, arguments)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
    )
    try:
        texts = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        texts = process.communicate()
        raise TimeoutError(
            f"{' '.join(command)} did not end within {timeout} s:\n{tail(*texts)}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def tail(stdout, stderr, length=8000):
    """Return the end of what a program has printed."""
    return f"{stdout[-length:]}\n{stderr[-length:]}"
