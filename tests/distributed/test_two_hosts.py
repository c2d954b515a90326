"""Promise: what holds on one host holds on two, and a link that fails is waited for a minute."""

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
    "DTRANSFORMER_BIND_CORES": "0",  # both hosts have the same ones
}

pytestmark = [pytest.mark.long, needs_horovod]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with TwoHosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def start(hosts, log, *arguments):
    """Start a program of Python on two ranks, one on each host."""
    command = hosts.horovodrun(HOROVODRUN, 2, sys.executable, *arguments)
    with open(log, "w") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, cwd=REPOSITORY, stdout=file, stderr=file)


@pytest.mark.runs("tied/alone@1x1", "deep/alone@1x1")
def test_losses_are_those_of_one_process(hosts, tmp_path, ranks_of):
    """Data, model and pipeline parallelism, and the optimizer sharded at each level."""
    process = start(hosts, tmp_path / "log", "-m", "harness.rank", tmp_path, *RUNS)
    assert process.wait(900) == 0, (tmp_path / "log").read_text()[-8000:]
    for name in RUNS:
        (expected,) = ranks_of(f"{name.partition('/')[0]}/alone@1x1")
        for rank in Run.of(name).read(tmp_path):
            np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)


@pytest.mark.parametrize("axis", ["model", "data", "stage"])
def test_a_link_that_fails_ends_both_ranks_within_a_minute(axis, hosts, tmp_path):
    """Without the watchdog, DTensor waits for ever."""
    log = tmp_path / "log"
    process = start(hosts, log, "-m", "tests.distributed.failing", "slow", axis, tmp_path)
    try:
        assert wait_for(log, "step 4", 180), log.read_text()[-4000:]
        hosts.set_link(False)
        begin = time.monotonic()
        process.wait(90)
        assert time.monotonic() - begin < 60
        told = log.read_text()
        assert "rank 1 on host 10.78.0.2: no heartbeat for" in told, told[-4000:]
        assert "rank 0 on host 10.78.0.1 was in" in told
        pattern = f"python.* -m tests.distributed.failing slow {axis} {tmp_path}"
        for _ in range(50):  # the second rank ends by itself
            if subprocess.run(["pgrep", "-f", pattern], capture_output=True).returncode:
                break
            time.sleep(0.2)
        else:
            pytest.fail("a rank of the second host has not ended")
    finally:
        hosts.set_link(True)
        process.kill()


def test_a_checkpoint_of_both_is_read_by_one(hosts, tmp_path):
    """Ranks of two hosts write it; one process, on another layout, goes on."""
    process = start(
        hosts, tmp_path / "log", "-m", "harness.drill_rank", tmp_path, "dp2@2x1+shard2", 6
    )  # fmt: skip
    assert process.wait(300) == 0, (tmp_path / "log").read_text()[-8000:]
    command = ["-m", "harness.drill_rank", tmp_path, "alone@1x1", 9]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Resuming from" in done.stdout and "ended at 9" in done.stdout, done.stderr[-4000:]
    assert "step 7 " in done.stdout and "step 6 " not in done.stdout
