"""A rank that fails ends the job with an error that names it, instead of a hang."""

import re

import pytest

from dtransformer.trainers.checkpoint.folders import saved_steps
from harness.launch import launch, tail
from tests.shared_runs import needs_horovod

# On a busy machine, a rank that reports the failure can end the job before the failed rank exits.
ENDED = "Process name: 1|the job ends: rank 1 on host localhost: failed"
# (kind of failure of the last rank, parallel axis) -> patterns of the output.
FAILURES = {
    ("kill", "model"): ["Process name: 1", "Exit code: 137"],
    ("raise", "model"): ["this rank has had enough", ENDED],
    ("crash", "data"): ["Fatal Python error: Segmentation fault", "in on_train_batch_end"],
    ("midst", "stage"): ["this rank has had enough", ENDED],
    ("save", "data"): ["Process name: 1", "Exit code: 137"],
    # Without the watchdog, Horovod and DTensor would wait for these ranks forever.
    ("freeze", "model"): ["rank 1 on host localhost: no heartbeat for", "rank 0 on host localhost"],
    ("unequal", "data"): ["rank 1 on host localhost: blocked the job for", "rank 0 is in step 6"],
    ("loop", "stage"): ["rank 1 on host localhost: blocked the job for", "callbacks after step 5"],
    ("freeze", "data"): ["rank 1 on host localhost: no heartbeat for"],
    ("freeze", "stage"): ["rank 1 on host localhost: no heartbeat for"],
    ("unequal", "model"): ["rank 1 on host localhost: blocked the job for"],
    # Horovod reports these ranks like the killed ranks above.
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
def test_failed_rank_ends_the_job(how, axis, tmp_path):
    """The timeout allows for the start, five steps and a minute."""
    environment = {"DTRANSFORMER_STALL_SECONDS": STALL_SECONDS}
    arguments = ["-m", "tests.distributed.failing", how, axis, tmp_path]
    completed = launch(2, arguments, timeout=240, environment=environment)
    output = tail(completed.stdout, completed.stderr, 20000)
    assert completed.returncode != 0
    assert "step 5" in output, output
    assert "step 7" not in output
    for pattern in FAILURES[how, axis]:
        assert re.search(pattern, output), output


@needs_horovod
@pytest.mark.parametrize(
    "axis", ["model", *(pytest.param(axis, marks=pytest.mark.long) for axis in ("data", "stage"))]
)
def test_stop_signal_to_one_rank_makes_all_ranks_save_and_exit(axis, tmp_path):
    """All ranks save after the same step and exit with the code for a requested stop."""
    arguments = ["-m", "tests.distributed.failing", "preempt", axis, tmp_path]
    completed = launch(2, arguments, timeout=240)
    output = tail(completed.stdout, completed.stderr, 20000)
    assert "Exit code: 75" in output and "step 50" not in output, output
    ((step, _),) = saved_steps(tmp_path)
    assert f"Stopping on request. Saved step {step} in" in output and 5 <= step < 50


@needs_horovod
@pytest.mark.long
def test_warns_of_a_rank_with_slow_data():
    """The warning names the slow rank within 20 steps, although nothing fails."""
    arguments = ["-m", "tests.distributed.failing", "straggle", "data", "nowhere"]
    done = launch(2, arguments, timeout=240)
    assert done.returncode == 0, tail(done.stdout, done.stderr)
    assert done.stderr.count("rank 1 on host localhost slows down the job") == 1
