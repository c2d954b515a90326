"""Promise: a rank that fails ends the job, with its name, instead of a hang."""

import re

import pytest

from dtransformer.trainers.checkpoint.folders import saved_steps
from harness.launch import launch, tail
from tests.shared_runs import needs_horovod

# On a busy machine another rank, which tells of it, may end the job before the one that fails ends.
ENDED = "Process name: 1|the job ends: rank 1 on host localhost: failed"
# How the last rank fails, what the ranks are together -> patterns of what the output says.
FAILURES = {
    ("kill", "model"): ["Process name: 1", "Exit code: 137"],
    ("raise", "model"): ["this rank has had enough", ENDED],
    ("crash", "data"): ["Fatal Python error: Segmentation fault", "in on_train_batch_end"],
    ("midst", "stage"): ["this rank has had enough", ENDED],
    ("save", "data"): ["Process name: 1", "Exit code: 137"],
    # What Horovod and DTensor would wait in for ever.
    ("freeze", "model"): ["rank 1 on host localhost: no heartbeat for", "rank 0 on host localhost"],
    ("unequal", "data"): ["rank 1 on host localhost: blocked the job for", "rank 0 is in step 6"],
    ("loop", "stage"): ["rank 1 on host localhost: blocked the job for", "callbacks after step 5"],
    ("freeze", "data"): ["rank 1 on host localhost: no heartbeat for"],
    ("freeze", "stage"): ["rank 1 on host localhost: no heartbeat for"],
    ("unequal", "model"): ["rank 1 on host localhost: blocked the job for"],
    # Horovod tells of these ranks as it does of those above.
    ("kill", "data"): ["Process name: 1", "Exit code: 137"],
    ("kill", "stage"): ["Process name: 1", "Exit code: 137"],
}
LONG = [
    *(("kill", axis) for axis in ("model", "data", "stage")),
    *(("freeze", axis) for axis in ("data", "stage")),
    ("unequal", "model"),
    ("loop", "stage"),
    ("crash", "data"),
    ("midst", "stage"),
]
STALL_SECONDS = "12"


@needs_horovod
@pytest.mark.parametrize(
    "how, axis",
    [pytest.param(*case, marks=[pytest.mark.long] * (case in LONG)) for case in FAILURES],
)
def test_a_rank_that_fails_ends_the_job(how, axis, tmp_path):
    """Within the time of a start, five steps and a minute."""
    environment = {"DTRANSFORMER_STALL_SECONDS": STALL_SECONDS}
    arguments = ["-m", "tests.distributed.failing", how, axis, tmp_path]
    done = launch(2, arguments, timeout=240, environment=environment)
    output = tail(done.stdout, done.stderr, 20000)
    assert done.returncode != 0
    assert "step 5" in output, output
    assert "step 7" not in output
    for words in FAILURES[how, axis]:
        assert re.search(words, output), output


@needs_horovod
@pytest.mark.parametrize(
    "axis", ["model", *(pytest.param(one, marks=pytest.mark.long) for one in ("data", "stage"))]
)
def test_a_rank_that_is_told_to_stop_lets_all_save_and_leave(axis, tmp_path):
    """After the same step, with the code that says so."""
    arguments = ["-m", "tests.distributed.failing", "preempt", axis, tmp_path]
    done = launch(2, arguments, timeout=240)
    output = tail(done.stdout, done.stderr, 20000)
    assert "Exit code: 75" in output and "step 50" not in output, output
    ((step, _),) = saved_steps(tmp_path)
    assert f"Asked to stop: saved at step {step} in" in output and 5 <= step < 50


@needs_horovod
@pytest.mark.long
def test_a_rank_whose_data_takes_twice_as_long_is_named():
    """Within 20 steps, though nothing fails."""
    arguments = ["-m", "tests.distributed.failing", "straggle", "data", "nowhere"]
    done = launch(2, arguments, timeout=240)
    assert done.returncode == 0, tail(done.stdout, done.stderr)
    assert done.stderr.count("rank 1 on host localhost slows down the job") == 1
