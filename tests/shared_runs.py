"""Multi-rank runs that several test files share, so that ranks start only once.

The mark `runs` lists the runs that a test reads. When a test requests the first result, the fixture
`rank_results` starts the runs of all selected tests, with one launch for each number of ranks.
"""

import contextlib
import fcntl
import os
import pathlib
import sys

import pytest

from harness.launch import HOROVODRUN
from harness.layouts import ALONE
from harness.runs import Run, launch_runs

# Tasks that read the checkpoints of all layouts. They run in a second launch, after all saves.
LATER = (
    "tests.distributed.tasks.checkpoints:restore_remaining",
    "tests.distributed.tasks.other_shards:restore_all",
)
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
    """Return the names of all runs that tests read, without duplicates."""
    marks = [mark for item in items for mark in item.iter_markers("runs")]
    return list(dict.fromkeys(name for mark in marks for name in mark.args))


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

    def _launch(self, start):
        """Launch all unfinished runs of a start.

        While another worker launches them, launch the remaining runs of other starts.
        """
        if self._launch_if_free(start, waits=start == _start(ALONE)):
            return
        other_starts = {_start(run.layout) for run in self._runs} - {start, _start(ALONE)}
        for other_start in sorted(other_starts):
            self._launch_if_free(other_start)
        self._launch_if_free(start, waits=True)

    def _launch_if_free(self, start, waits=False):
        """Launch all runs of a start unless another worker does. Return whether none does."""
        runs = [run for run in self._runs if _start(run.layout, run.task) == start]
        with _locked(self.folder / f"{start}.lock", waits) as is_free:
            if is_free and runs:
                launch_runs(runs[0].layout.ranks, runs, self.folder, self._options)
        return is_free


def _start(layout, task=""):
    """Return a key for runs that one launch can execute together."""
    name = "alone" if layout.ranks == layout.devices == 1 else f"{layout.ranks}-ranks"
    return name + "-later" * (task in LATER)


@contextlib.contextmanager
def _locked(path, waits):
    """Lock a file and yield whether this process has the lock. Only wait for it if `waits`."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def shared_folder(tmp_path_factory):
    """Return a folder that is the same for all workers of pytest-xdist.

    The environment variable DTRANSFORMER_RUNS overrides it. Finished runs there are reused.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_RUNS", folder)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
