"""Two hosts give the results of one, and a failed link ends the job within a minute."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from harness.launch import HOROVODRUN, REPOSITORY
from harness.runs import Run
from harness.tolerances import PARITY_LOSS
from harness.two_hosts import TwoHosts, wait_for, why_not
from tests.shared_runs import needs_horovod

LAYOUTS = ["dp2@2x1", "mp2@2x1", "dp2@2x1+shard1", "dp2@2x1+shard2", "dp2@2x1+shard3"]
RUNS = [f"tied/{layout}" for layout in LAYOUTS] + ["deep/pp2m2-1f1b@2x1"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "DTRANSFORMER_BIND_CORES": "0",  # Both hosts share the same cores.
}

pytestmark = [pytest.mark.long, needs_horovod]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with TwoHosts(tmp_path_factory.mktemp("hosts")) as two_hosts:
        yield two_hosts


def start(hosts, log, *arguments):
    """Start a Python program on two ranks, one on each host."""
    command = hosts.horovodrun(HOROVODRUN, 2, sys.executable, *arguments)
    with open(log, "w") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, cwd=REPOSITORY, stdout=file, stderr=file)


@pytest.mark.runs("tied/alone@1x1", "deep/alone@1x1")
def test_losses_match_one_process(hosts, tmp_path, rank_results):
    """The layouts use data, model and pipeline parallelism, and each level of sharded optimizer."""
    process = start(hosts, tmp_path / "log", "-m", "harness.rank", tmp_path, *RUNS)
    assert process.wait(900) == 0, (tmp_path / "log").read_text()[-8000:]
    for name in RUNS:
        (expected,) = rank_results(f"{name.partition('/')[0]}/alone@1x1")
        for rank in Run.from_name(name).read(tmp_path):
            np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)


@pytest.mark.parametrize("axis", ["model", "data", "stage"])
def test_failed_link_ends_both_ranks_within_a_minute(axis, hosts, tmp_path):
    """Without the watchdog, DTensor would wait forever."""
    log = tmp_path / "log"
    process = start(hosts, log, "-m", "tests.distributed.failing", "slow", axis, tmp_path)
    try:
        assert wait_for(log, "step 4", 180), log.read_text()[-4000:]
        hosts.set_link(False)
        start_time = time.monotonic()
        process.wait(90)
        assert time.monotonic() - start_time < 60
        message = log.read_text()
        assert "rank 1 on host 10.78.0.2: no heartbeat for" in message, message[-4000:]
        assert "rank 0 on host 10.78.0.1 was in" in message
        pattern = f"python.* -m tests.distributed.failing slow {axis} {tmp_path}"
        for _ in range(50):  # The second rank needs some time to end.
            if subprocess.run(["pgrep", "-f", pattern], capture_output=True).returncode:
                break
            time.sleep(0.2)
        else:
            pytest.fail("a rank of the second host has not ended")
    finally:
        hosts.set_link(True)
        process.kill()


def test_one_process_restores_a_checkpoint_of_two_hosts(hosts, tmp_path):
    """The process resumes training on another layout."""
    process = start(
        hosts, tmp_path / "log", "-m", "harness.drill_rank", tmp_path, "dp2@2x1+shard2", 6
    )  # fmt: skip
    assert process.wait(300) == 0, (tmp_path / "log").read_text()[-8000:]
    command = ["-m", "harness.drill_rank", tmp_path, "alone@1x1", 9]
    completed = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Resuming from" in completed.stdout and "ended at 9" in completed.stdout, (
        completed.stderr[-4000:]
    )
    assert "step 7 " in completed.stdout and "step 6 " not in completed.stdout
