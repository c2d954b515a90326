"""A run folder records the output of every rank and the environment of every start."""

import io
import json
import os
import subprocess
import sys

import pytest

from dtransformer.runs.records import _CopiedStream, _Log, rank_log, write_environment

PROGRAM = """
import os, pathlib, sys
from dtransformer.runs.records import rank_log
with rank_log(pathlib.Path(sys.argv[1])):
    print("to standard output", flush=True)
    os.write(2, b"from a C++ library\\n")
    {end}
print("after the run")
"""


def run_program(folder, end):
    command = [sys.executable, "-c", PROGRAM.format(end=end), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("end", ["pass", "raise ValueError('no luck')", "os.abort()"])
def test_log_contains_output_errors_and_messages_of_libraries(end, tmp_path):
    process = run_program(tmp_path, end)
    log = (tmp_path / "logs/rank-0.log").read_text()
    assert "to standard output\n" in log and "from a C++ library\n" in log
    assert ("ValueError: no luck" in log) == ("no luck" in end)
    assert "after the run" not in log
    # The terminal shows the same.
    assert "to standard output\n" in process.stdout and "from a C++ library\n" in process.stderr
    assert ("after the run\n" in process.stdout) == (end == "pass")


def test_second_start_appends(tmp_path):
    for _ in range(2):
        with rank_log(tmp_path):
            print("to standard output")
    log = (tmp_path / "logs/rank-0.log").read_text()
    assert log.count("to standard output") == log.count("== ") == 2


def test_progress_bar_is_recorded_in_its_last_state():
    terminal, file = io.StringIO(), io.BytesIO()
    stream = _CopiedStream(terminal, _Log(file))
    stream.write("\r\x1b[1m1/2\x1b[0m loss: 3")
    stream.write("\b\b\b\r\x1b[1m2/2\x1b[0m loss: 2\nnext")
    stream.end_line()
    assert file.getvalue() == b"2/2 loss: 2\nnext\n"
    assert terminal.getvalue().endswith("loss: 2\nnext")


def test_full_disk_does_not_end_the_training(tmp_path):
    terminal = io.StringIO()
    with open("/dev/full", "wb", buffering=0) as full:
        stream = _CopiedStream(terminal, _Log(full))
        stream.write("loss: 2\n")
    assert terminal.getvalue() == "loss: 2\n"


def test_environment_lists_each_start(tmp_path):
    write_environment(tmp_path, "abc")
    write_environment(tmp_path, "abc")
    starts = json.loads((tmp_path / "env.json").read_text())
    assert len(starts) == 2
    first = starts[0]
    assert first["config_sha256"] == "abc"
    assert {"tensorflow", "keras"} <= first["packages"].keys()
    assert [rank["host"] for rank in first["ranks"]] == [os.uname().nodename]
    assert first["ranks"][0]["devices"]


def test_streams_are_restored(tmp_path):
    stdout = sys.stdout
    with rank_log(tmp_path):
        assert sys.stdout is not stdout
    assert sys.stdout is stdout
