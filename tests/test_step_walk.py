"""A training step runs the functions that docs/architecture.md lists, in few files."""

import json
import subprocess
import sys

import pytest

from tests.test_docs import ROOT, walks

PARTS = {"One device": "one_device", "On a mesh": "mesh", "In a pipeline": "pipeline"}
# Maximum number of files that run in a step, and of their lines of code, without layers and gradients.
MAX_FILES = {"one_device": 12, "mesh": 28, "pipeline": 38}
MAX_LINES = {"one_device": 1450, "mesh": 3225, "pipeline": 4650}


@pytest.mark.parametrize("name", PARTS)
def test_step_calls_every_function_of_its_walk(name):
    command = [sys.executable, ROOT / "docs/step_walk.py", PARTS[name]]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    counts, files = map(json.loads, process.stdout.split("\n", 1))
    passed = {*files, "trainers/epoch_loop.py"}
    assert not {file for file, _ in walks()[name]} - passed
    assert counts["files"] <= MAX_FILES[PARTS[name]], files
    assert counts["lines"] <= MAX_LINES[PARTS[name]], files
