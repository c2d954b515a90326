"""`dtransformer launch` restarts a command after a failure, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.shared_runs import needs_horovod

TIMEOUT = 120


def launch(*options, command, **environment):
    """Return the process of `dtransformer launch OPTIONS -- sh -c COMMAND`."""
    arguments = ["-m", "dtransformer.cli", "launch", *options, "--", "sh", "-c", command]
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@needs_horovod
def test_restarts_a_failed_command(tmp_path):
    """The environment contains the ranks per host, and remaining processes are killed."""
    script = (
        f'test "$DTRANSFORMER_FIT_LAYOUT" = 1 || exit 9; cd {tmp_path}; '
        "if mkdir first; then setsid sleep 1235 > /dev/null 2>&1 & exit 3; fi; "
        "echo second life"
    )
    process = launch("-np", "1", "--min-ranks", "1", "--restarts", "1", command=script)
    message, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, message + errors
    assert "second life" in message
    assert "rank 0 has ended with code 3: restart 1 of 1" in errors
    left = subprocess.run(["pgrep", "-f", "^sleep 1235"], capture_output=True, check=False)
    assert not left.stdout


@needs_horovod
@pytest.mark.long
def test_does_not_restart_after_wrong_options():
    process = launch("-np", "1", command="echo once; exit 2")
    message, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2 and message.count("once") == 1, message + errors


@needs_horovod
@pytest.mark.long
def test_forwards_signals_to_ranks_that_handle_them():
    """Shells do not get the signal. Ranks that still start get it later. The exit code is 75."""
    rank = (
        "import signal, sys, time; print('ready', flush=True); time.sleep(3); "
        "signal.signal(10, lambda *x: sys.exit(75)); time.sleep(99)"
    )
    process = launch("-np", "1", command=f'exec {sys.executable} -c "{rank}"')
    for line in process.stdout:
        if "ready" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, errors
    assert "asked to stop: ranks were asked to stop, and have saved" in errors


@pytest.mark.parametrize("options, message", [
    ([], "No command was given"),
    (["--hosts", "/nowhere/hosts", "--", "x"], "/nowhere/hosts"),
    (["--hosts", "a", "--host-discovery-script", "b", "--", "x"], "not allowed with"),
    (["--host-discovery-script", "/bin/false", "--", "x"], "has ended with code 1"),
    (["--restarts", "-1", "--", "x"], "expected an integer"),
    (["-np", "0", "--", "x"], "expected an integer"),
    (["-np", "2", "--min-ranks", "4", "--", "x"], "--min-ranks exceeds the 2 ranks of -np"),
])  # fmt: skip
@needs_horovod
def test_wrong_launch_options_are_one_line_errors(options, message, capsys):
    from dtransformer.cli import main

    assert main(["launch", *options]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
