"""Multi-rank runs are launched once. Each run finds the files of earlier runs."""

import pathlib
import subprocess
import sys
import threading
import types

import pytest

from tests import shared_runs
from tests.shared_runs import SharedRuns, is_process_alive, requested_runs

LATER = "tests.distributed.tasks.checkpoints:restore_remaining/dp2@2x1"
NAMES = ["tied/dp4@4x1", LATER, "tied/dp2@2x1", "tied/mp2@1x2", "tied/alone@1x1"]


class Launches:
    """Replacement of `launch_runs` that records the runs of each launch."""

    def __init__(self):
        self.names, self.may_end = [], threading.Event()

    def __call__(self, num_ranks, runs, folder, options):
        self.names.append([run.name for run in runs])
        assert self.may_end.wait(30)


@pytest.fixture
def launches(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(shared_runs, "launch_runs", launches)
    monkeypatch.setattr(shared_runs, "HOROVODRUN", pathlib.Path(sys.executable))
    return launches


def test_one_device_comes_first_and_readers_of_checkpoints_last(launches, tmp_path):
    launches.may_end.set()
    SharedRuns(tmp_path, NAMES).launch_all()
    first, *others, last = launches.names
    assert first == ["tied/alone@1x1"] and last == [LATER]
    assert sorted(others) == [["tied/dp2@2x1"], ["tied/dp4@4x1"], ["tied/mp2@1x2"]]
    assert others.index(["tied/dp2@2x1"]) < others.index(["tied/dp4@4x1"])


def test_runs_of_several_ranks_are_skipped_without_horovod(launches, tmp_path, monkeypatch):
    launches.may_end.set()
    monkeypatch.setattr(shared_runs, "HOROVODRUN", tmp_path / "missing")
    SharedRuns(tmp_path, NAMES).launch_all()
    assert launches.names == [["tied/alone@1x1"], ["tied/mp2@1x2"]]


def test_other_processes_wait_for_a_launch(launches, tmp_path):
    runs = SharedRuns(tmp_path, ["tied/alone@1x1"])
    threads = [threading.Thread(target=runs.launch_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert len(launches.names) == 1
    launches.may_end.set()
    for thread in threads:
        thread.join(30)
    assert len(launches.names) == 2  # The real function returns if all runs have ended.


def test_used_networks_also_request_the_run_on_one_device():
    marks = [pytest.mark.runs("tied.used/dp2@2x1", "tied/dp2@2x1").mark]
    item = types.SimpleNamespace(iter_markers=lambda name: marks)
    names = ["tied.used/dp2@2x1", "tied/dp2@2x1", "tied.used/alone@1x1"]
    assert requested_runs([item, item]) == names


def test_ranks_end_with_their_owner(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_process_alive(ended.pid)
    process = shared_runs.launch_in_background(tmp_path, NAMES[-1:], [], owner=ended.pid)
    assert process.wait(60) == 1
    assert not list(tmp_path.glob("*.npz"))
