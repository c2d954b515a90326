"""Ranks of one host start without ssh, print no noise, and always end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dtransformer.cli import main
from dtransformer.cli.launching import supervisor
from tests.cli.launching.test_launch import TIMEOUT, launch
from tests.shared_runs import needs_horovod

pytestmark = needs_horovod
STARTING = "dtransformer launch: starting 2 ranks on localhost:2\n"
TRACEBACK = "Traceback (most recent call last)\\n  File x, line 1\\nValueError: wrong\\n"


def run(command, *options, **environment):
    """Launch two ranks of a shell command. Return the exit code, the output and the errors."""
    process = launch("-np", "2", *options, command=command, **environment)
    output, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, output, errors


def running(command):
    """Return the processes whose command line begins with a text."""
    result = subprocess.run(["pgrep", "-f", f"^{command}"], capture_output=True, check=False)
    return result.stdout.split()


def wait_for(process, word):
    """Read the output of a launch until all ranks have printed a word."""
    missing = 2
    for line in process.stdout:
        missing -= word in line
        if not missing:
            return


def test_command_needs_neither_ssh_nor_horovodrun(tmp_path):
    """The output has only the lines of the ranks, each with its rank."""
    for program in ("ssh", "horovodrun"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, output, errors = run("echo $HOROVOD_LOCAL_RANK of $HOROVOD_SIZE", PATH=path)
    assert (code, errors) == (0, STARTING)
    assert sorted(output.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_error_of_all_ranks_is_shown_once():
    code, output, errors = run("echo 'dtransformer: no such file' >&2; sleep 1; exit 2")
    assert code == 2 and output == ""
    assert errors.count("no such file") == 1
    assert len(errors.splitlines()) == 2, errors


def test_traceback_of_all_ranks_is_shown_once_and_in_one_piece():
    code, _, errors = run(f"printf '{TRACEBACK}' >&2; sleep 1; exit 1")
    lines = errors.splitlines()
    assert code == 1 and len(lines) == 5, errors
    rank = lines[1][:4]
    expected = TRACEBACK.split("\\n")[:3]
    assert lines[1:4] == [rank + line for line in expected]
    assert lines[4].startswith("dtransformer launch: rank ")


def test_failure_ends_the_other_ranks_and_is_not_repeated_by_default():
    script = "test $HOROVOD_RANK = 0 && exec sleep 1237; echo once; kill -KILL $$"
    code, output, errors = run(script)
    assert code == 1 and output == "[1] once\n"
    assert errors == f"{STARTING}dtransformer launch: rank 1 was killed by SIGKILL\n"
    assert not running("sleep 1237")


def test_frozen_rank_is_killed_soon_after_another_rank_reports_it():
    report = (
        "dtransformer: the job ends: rank 1 on host localhost: no heartbeat for 15 s; rank 0 waits"
    )
    script = f"test $HOROVOD_RANK = 1 && kill -STOP $$; echo '{report}' >&2; sleep 1; exit 1"
    start = time.monotonic()
    code, _, errors = run(script)
    assert code == 1 and "no heartbeat for 15 s" in errors
    assert time.monotonic() - start < 25


def test_ctrl_c_ends_ranks_that_ignore_signals():
    script = 'trap "" INT TERM; echo ready; setsid sleep 1238 & sleep 1238'
    process = launch("-np", "2", command=script)
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, errors
    assert errors.endswith("dtransformer launch: interrupted\n")
    assert not running("sleep 1238")


def test_repeated_signal_lets_ranks_finish_their_output():
    script = 'trap "sleep 1; echo saved; exit 130" INT; echo ready; while true; do sleep 0.1; done'
    process = launch("-np", "2", command=script)
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130 and output.count("saved") == 2, output + errors


def test_signal_before_ranks_start_ends_the_launcher_with_code_75(monkeypatch, capsys):
    def read_hosts(options):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"localhost": 1}

    monkeypatch.setattr(supervisor, "read_hosts", read_hosts)
    monkeypatch.setattr(supervisor, "_LOOK_AGAIN", 0.0)
    assert main(["launch", "--min-ranks", "2", "--", "true"]) == supervisor.PREEMPTED
    assert "asked to stop: no ranks were started" in capsys.readouterr().err


def test_ranks_end_if_the_launcher_is_killed():
    process = launch("-np", "2", command="echo ready; sleep 1239")
    wait_for(process, "ready")
    process.kill()
    process.communicate(timeout=TIMEOUT)
    end = time.monotonic() + TIMEOUT
    while running("sleep 1239") and time.monotonic() < end:
        time.sleep(0.1)
    assert not running("sleep 1239")


def test_missing_command_is_a_one_line_error():
    arguments = ["-m", "dtransformer.cli", "launch", "-np", "2", "--", "no-such-program"]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 2
    _, error = done.stderr.splitlines()
    assert error.startswith("dtransformer: the command after --:") and "no-such-program" in error


def test_rank_0_reads_standard_input():
    arguments = ["-m", "dtransformer.cli", "launch", "-np", "2", "--", "cat"]
    done = subprocess.run(
        [sys.executable, *arguments],
        input="a\nb\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0 and done.stdout == "[0] a\n[0] b\n", done.stderr


@pytest.mark.parametrize("options, expected", [([], "no"), (["--min-ranks", "1"], "2")])
def test_layout_is_replaced_only_if_ranks_may_be_missing(options, expected):
    code, output, _ = run("echo ${DTRANSFORMER_FIT_LAYOUT-no}", *options)
    assert code == 0 and output.count(f"] {expected}\n") == 2


@pytest.mark.parametrize("line, is_shown", [
    ("[0] I0000 00:00:17 5 port.cc:153] oneDNN custom operations are on.\n", False),
    ("[0]<stderr>:I0000 00:00:17 5 port.cc:153] oneDNN custom operations are on.\n", False),
    ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n", False),
    ("Process name: 0\n", False),
    ("[0] E0000 00:00:17 5 cuda.cc:1] no device\n", True),
    ("[0] In 2026\n", True),
])  # fmt: skip
def test_hides_notes_of_tensorflow_and_horovodrun(line, is_shown):
    assert supervisor.Outcome().read(line) is is_shown


@pytest.mark.long
def test_horovodrun_shows_lines_of_ranks_only(monkeypatch, capfd):
    """It starts ranks of several hosts. Its notes of TensorFlow and its traceback are left out."""
    monkeypatch.setattr(supervisor, "is_here", lambda host: False)
    script = "echo 'dtransformer: no such file' >&2; sleep 1; exit 2"
    assert main(["launch", "-np", "2", "--", "sh", "-c", script]) == 2
    output, errors = capfd.readouterr()
    text = output + errors
    assert "<stderr>:dtransformer: no such file" in text
    for noise in ("absl", "oneDNN", "Traceback", "Horovod detected", "Exit code"):
        assert noise not in text


@pytest.mark.long
def test_ranks_find_each_other():
    script = "import dtransformer as d; d.init(); print(d.size()); d.shutdown()"
    code, output, errors = run(f"exec {sys.executable} -c '{script}'")
    assert code == 0 and sorted(output.splitlines()) == ["[0] 2", "[1] 2"], errors
    assert errors == STARTING
