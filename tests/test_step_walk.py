"""Promise: a step passes the stations that docs/architecture.md names, no more files than it says."""

import json
import subprocess
import sys

import pytest

from tests.test_docs import ROOT, walks

PARTS = {"One device": "one_device", "On a mesh": "mesh", "In a pipeline": "pipeline"}
# Files that run in a step, but for what the network's layers call, and their gradients.
MOST_FILES = {"one_device": 18, "mesh": 30, "pipeline": 42}


@pytest.mark.parametrize("name", PARTS)
def test_a_step_calls_each_station(name):
    command = [sys.executable, ROOT / "docs/step_walk.py", PARTS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    counts, files = map(json.loads, done.stdout.split("\n", 1))
    passed = {*files, "trainers/epoch_loop.py"}
    assert not {file for file, _ in walks()[name]} - passed
    assert counts["files"] <= MOST_FILES[PARTS[name]]
