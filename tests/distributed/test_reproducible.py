"""Promise: a job of many ranks gives the same each time, to the last bit."""

import re

import pytest

from harness.launch import launch, tail
from tests.shared_runs import needs_horovod


@needs_horovod
@pytest.mark.long
def test_four_ranks_give_the_same_weights_twice(tmp_path):
    """Of more than two ranks the order in which a ring adds up may depend on what else is sent."""
    found = set()
    for folder in (tmp_path / "first", tmp_path / "second"):
        arguments = ["-m", "harness.drill_rank", folder, "dp4@4x1", 60, "--dropout", 0.1]
        done = launch(4, arguments, timeout=240)
        assert done.returncode == 0, tail(done.stdout, done.stderr)
        found |= set(re.findall(r"ended at 60 with (\w+)", done.stdout))
    assert len(found) == 1
