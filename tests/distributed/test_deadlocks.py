"""Ranks that deadlock outside of a step end the job and report the call that waits."""

import re

import pytest

from harness.launch import launch, tail
from tests.shared_runs import needs_horovod

# (action or error of a single rank, parallel axis) -> patterns of the final error.
SCENARIOS = {
    ("read", "shards"): [
        "rank 0 in code outside of fit, .* waiting in .*'read/.*' for rank 1",
        "the barrier",
    ],
    ("fit_after_a_callback", "data"): [
        r"rank 0 .* waiting in .*\(checksums\) for rank 1",
        "rank 1 is in step 7",
    ],
    ("barrier_after_a_callback", "model"): [
        "rank 1 .* waiting in the barrier for rank 0",
        "step 6",
    ],
    ("fit_after_a_stage", "stage"): ["rank 0 in .* waiting in send/recv .* for rank 1"],
    ("evaluate", "model"): ["rank 0 in validation .* waiting in .* for rank 1", "the barrier"],
    ("predict", "stage"): ["rank 0 .* in validation .* waiting in .*same_batch.* for rank 1"],
    ("call", "stage"): [
        "rank 0 in code outside of fit, .* waiting in .*same_batch.* for rank 1",
        "the barrier",
    ],
    ("save", "data"): ["rank 0 .* in saving .* waiting in .*checkpoint/state.* for rank 1"],
    ("save_in_a_thread", "data"): ["rank 0 in .* waiting in .*checkpoint/.* for rank 1"],
    ("restore", "data"): ["rank 0 .* in saving .* waiting in .*checkpoint/.* for rank 1"],
    ("begin", "data"): [
        r"rank 0 .* waiting in .*\(trained\) for rank 1",
        "rank 1 is in step 5",
    ],
    ("group", "data"): [
        "rank 0 in code outside of fit, .* waiting in new_group for rank 1",
        "the barrier",
    ],
    ("collective", "data"): [
        "rank 0 .* in code outside of fit, .* waiting in allgather .* for rank 1"
    ],
    ("function", "data"): [
        r"rank 0 .* in code outside of fit, .* a TensorFlow function \(distributed/deadlocks.py"
    ],
    ("shutdown", "model"): [
        "rank 0 .* in code outside of fit, .* waiting in the barrier for rank 1"
    ],
}
STALL_SECONDS = "12"


@needs_horovod
@pytest.mark.long
@pytest.mark.parametrize("scenario, axis", SCENARIOS)
def test_stalled_job_ends_and_reports_what_each_rank_waits_for(scenario, axis, tmp_path):
    environment = {"DTRANSFORMER_STALL_SECONDS": STALL_SECONDS}
    arguments = ["-m", "tests.distributed.deadlocks", scenario, axis, tmp_path]
    completed = launch(2, arguments, timeout=240, environment=environment)
    output = tail(completed.stdout, completed.stderr, 20000)
    assert completed.returncode != 0 and "is done" not in output
    verdicts = [line for line in completed.stderr.splitlines() if "the job ends: " in line]
    assert verdicts, output
    for pattern in SCENARIOS[scenario, axis]:
        assert re.search(pattern, verdicts[0]), verdicts[0]


@needs_horovod
@pytest.mark.long
def test_data_that_fail_on_one_rank_are_reported_as_different_batches(tmp_path):
    arguments = ["-m", "tests.distributed.deadlocks", "fit_after_data", "data", tmp_path]
    environment = {"DTRANSFORMER_STALL_SECONDS": STALL_SECONDS}
    completed = launch(2, arguments, timeout=240, environment=environment)
    output = tail(completed.stdout, completed.stderr, 20000)
    assert completed.returncode != 0 and "is done" not in output
    assert "rank 1 caught" in output and "a file is gone" in output
    assert "Rank 0 and rank 1 have different batches in step 6." in output
