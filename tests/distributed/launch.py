"""Starts ranks under horovodrun, bounded in time."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

HOROVODRUN = pathlib.Path(sys.executable).with_name("horovodrun")

needs_horovod = pytest.mark.skipif(
    not HOROVODRUN.exists(),
    reason="Horovod is not installed: dtransformer doctor --install-horovod",
)


def launch(num_ranks, arguments, timeout=600, environment=None):
    """Run `python ARGUMENTS` on several ranks; return the exit code and all output.

    Args:
        num_ranks: number of ranks.
        arguments: list of str.
        timeout: seconds, after which the job is ended and the test fails.
        environment: dict of additional environment variables.
    """
    command = [HOROVODRUN, "--gloo", "-np", str(num_ranks), sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {timeout} s:\n{output[-8000:]}")
    return process.returncode, output
