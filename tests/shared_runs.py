"""Multi-rank runs that several test files share, so that ranks start only once.

The mark `runs` lists the runs that a test reads. `launch_in_background` launches the runs of all
selected tests in a separate process, with one launch for each number of ranks. In the meantime the
workers of pytest run tests of one process. The fixture `rank_results` waits for results.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from harness.launch import HOROVODRUN, REPOSITORY, kill_launched
from harness.layouts import ALONE
from harness.runs import USED, Run, launch_runs

# Tasks that read the checkpoints of all layouts. They run in a second launch, after all saves.
LATER = (
    "tests.distributed.tasks.checkpoints:restore_remaining",
    "tests.distributed.tasks.other_shards:restore_all",
)
_LATER = "-later"  # Suffix of their launch.
needs_horovod = pytest.mark.skipif(
    not HOROVODRUN.exists(),
    reason="Horovod is not installed: dtransformer doctor --install-horovod",
)


def parametrize_runs(runs, long=(), reads=lambda run: ()):
    """Parametrize a test by `run`.

    Args:
        runs: List of run names.
        long: Run names that belong to the long suite.
        reads: Function from a run name to the names of other runs that the test reads.
    """
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(
                run,
                marks=[pytest.mark.runs(run, *reads(run)), *[pytest.mark.long] * (run in long)],
            )
            for run in runs
        ],
    )


def on_ranks(layout):
    """Turn a function into a test that every rank of a layout runs without an exception.

    Args:
        layout: Name of the layout.
    """

    def make_test(function):
        tasks = vars(sys.modules[function.__module__]).setdefault("TASKS", {})
        tasks[function.__name__] = function
        name = f"{function.__module__}:{function.__name__}/{layout}"

        @pytest.mark.runs(name)
        def test(rank_results):
            rank_results(name)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return make_test


def requested_runs(items):
    """Return the names of all runs that tests read, and of the runs that these need."""
    marks = [mark for item in items for mark in item.iter_markers("runs")]
    names = [name for mark in marks for name in mark.args]
    needed = [one_device_run(name) for name in names if USED in name]
    return list(dict.fromkeys(names + needed))


def one_device_run(name):
    """Return the run of the same task on one device. Runs of `NETWORK.used` load its weights."""
    return Run(Run.from_name(name).task, ALONE).name


class SharedRuns:
    """Results of multi-rank runs, shared by the workers of pytest-xdist.

    Args:
        folder: Folder of results, the same for all workers.
        names: Names of all runs.
        options: List of additional arguments of harness/rank.py.
    """

    def __init__(self, folder, names, options=()):
        self.folder = pathlib.Path(folder)
        self._options = options
        self._runs = [Run.from_name(name) for name in names]

    def __contains__(self, name):
        """Return whether a selected test reads a run."""
        return Run.from_name(name) in self._runs

    def __call__(self, name):
        """Launch a run if necessary and return a list with the result dict of each rank."""
        run = Run.from_name(name)
        assert name in self, f"mark the test with pytest.mark.runs({name!r})"
        if run.layout.ranks > 1 and not HOROVODRUN.exists():
            pytest.skip(needs_horovod.kwargs["reason"])
        self._launch(_start(ALONE))  # other layouts load its checkpoints
        self._launch(_start(run.layout))
        if run.task in LATER:
            self._launch(_start(run.layout, run.task))
        if errors := run.errors(self.folder):
            pytest.fail(errors, pytrace=False)
        return run.read(self.folder)

    def launch_all(self):
        """Launch all runs: one device first, then meshes beside several ranks, then the later tasks.

        Other processes wait for each launch, because this process locks all of them first.
        """
        starts = {_start(run.layout, run.task): run.layout.ranks for run in self._runs}
        if not HOROVODRUN.exists():
            starts = {start: num_ranks for start, num_ranks in starts.items() if num_ranks == 1}
        later = [start for start in starts if start.endswith(_LATER)]
        others = sorted(starts.keys() - {_start(ALONE), *later})
        with contextlib.ExitStack() as stack:
            locks = {start: stack.enter_context(self._lock(start)) for start in sorted(starts)}

            def launch_in_turn(starts):
                for start in starts:
                    self._launch_unfinished(start)
                    locks[start].close()  # This also unlocks the file.

            launch_in_turn(start for start in starts if start == _start(ALONE))
            meshes = [start for start in others if starts[start] == 1]
            several_ranks = [start for start in others if starts[start] > 1]
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(launch_in_turn, (meshes, several_ranks)))
            launch_in_turn(later)

    def _launch(self, start):
        """Launch all unfinished runs of a start. Wait if another process launches them."""
        with self._lock(start):
            self._launch_unfinished(start)

    def _launch_unfinished(self, start):
        runs = [run for run in self._runs if _start(run.layout, run.task) == start]
        if runs:
            launch_runs(runs[0].layout.ranks, runs, self.folder, self._options)

    def _lock(self, start):
        """Return an open file with a lock. Closing it unlocks it."""
        file = open(self.folder / f"{start}.lock", "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file


def _start(layout, task=""):
    """Return a key for runs that one launch can execute together."""
    name = "alone" if layout.ranks == layout.devices == 1 else f"{layout.ranks}-ranks"
    return name + _LATER * (task in LATER)


def shared_folder(tmp_path_factory):
    """Return a folder that is the same for all workers of pytest-xdist.

    The environment variable DTRANSFORMER_RUNS overrides it. Finished runs there are reused.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_RUNS", folder)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def launch_in_background(folder, names, options, owner):
    """Launch runs in a separate process, which ends with the process `owner`.

    Args:
        folder: Folder of results.
        names: List of names of runs.
        options: List of additional arguments of harness/rank.py.
        owner: Process id. If this process ends, the ranks are killed.

    Returns:
        The process, a `subprocess.Popen`.
    """
    arguments = [f"--owner={owner}", f"--options={' '.join(options)}", folder, *names]
    with open(folder / "background.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.shared_runs", *map(str, arguments)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )


def _end_with(owner):
    """Wait until a process has ended. Then kill all ranks and end this process."""
    while is_process_alive(owner):
        time.sleep(1)
    kill_launched()
    os._exit(1)


def is_process_alive(process_id):
    """Return whether a process exists, by its id."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description="Launch runs until a process ends.")
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--options", default="")
    parser.add_argument("folder")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The owner ends after an interrupt.
    threading.Thread(target=_end_with, args=(arguments.owner,), daemon=True).start()
    SharedRuns(arguments.folder, arguments.names, arguments.options.split()).launch_all()


if __name__ == "__main__":
    main()
