"""Promises of operations that are cut over the mesh of one process; see mesh_checks.py."""

import json
import subprocess
import sys

import pytest

from tests.distributed.mesh_checks import CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each check raised: in a process of its own, as a mesh starts TensorFlow anew."""
    path = tmp_path_factory.mktemp("mesh") / "results.json"
    command = [sys.executable, "-m", "tests.distributed.mesh_checks", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_mesh_of_four_devices(name, results):
    assert results[name] is None, results[name]
