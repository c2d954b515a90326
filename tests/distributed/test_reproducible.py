"""Repeated jobs of several ranks give identical weights, bit for bit."""

import re

import pytest

from harness.launch import launch, tail
from tests.shared_runs import needs_horovod


@needs_horovod
@pytest.mark.long
def test_four_ranks_train_the_same_weights_in_two_runs(tmp_path):
    """With more than two ranks, the summation order of a ring can depend on other transfers."""
    fingerprints = set()
    for folder in (tmp_path / "first", tmp_path / "second"):
        arguments = ["-m", "harness.drill_rank", folder, "dp4@4x1", 60, "--dropout", 0.1]
        completed = launch(4, arguments, timeout=240)
        assert completed.returncode == 0, tail(completed.stdout, completed.stderr)
        fingerprints |= set(re.findall(r"ended at 60 with (\w+)", completed.stdout))
    assert len(fingerprints) == 1
