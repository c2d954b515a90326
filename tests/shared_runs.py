"""Runs that several test files share: ranks are started once for all of them.

A test says which runs it reads with the mark `runs`; the fixture `ranks_of` starts all that the
chosen tests read, in one launch for each number of ranks, when the first result is asked for.
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

# What reads the checkpoints of all layouts: in a launch after those that save.
LATER = (
    "tests.distributed.tasks.checkpoints:restore_the_others",
    "tests.distributed.tasks.other_shards:restore_all",
)
needs_horovod = pytest.mark.skipif(
    not HOROVODRUN.exists(),
    reason="Horovod is not installed: dtransformer doctor --install-horovod",
)


def each(runs, long=(), reads=lambda run: ()):
    """Parametrize a test by `run`.

    Args:
        runs: list of the runs' names.
        long: those of them that belong to the long suite.
        reads: a function of a run's name that returns what is read besides.
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
    """Make a test of a function: every rank of a layout calls it, and none may raise.

    Args:
        layout: its name.
    """

    def test_of(function):
        tasks = vars(sys.modules[function.__module__]).setdefault("TASKS", {})
        tasks[function.__name__] = function
        name = f"{function.__module__}:{function.__name__}/{layout}"

        @pytest.mark.runs(name)
        def test(ranks_of):
            ranks_of(name)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return test_of


def read_by(items):
    """Return the names of all runs that tests read, each once."""
    marks = [mark for item in items for mark in item.iter_markers("runs")]
    return list(dict.fromkeys(name for mark in marks for name in mark.args))


class SharedRuns:
    """What the ranks of runs give; the workers of pytest-xdist share it.

    Args:
        folder: where results are, the same for all workers.
        names: of all runs.
        options: list of further arguments of harness/rank.py.
    """

    def __init__(self, folder, names, options=()):
        self.folder = pathlib.Path(folder)
        self._options = options
        self._runs = [Run.of(name) for name in names]

    def __contains__(self, name):
        """Return whether a test that was chosen reads a run."""
        return Run.of(name) in self._runs

    def __call__(self, name):
        """Return what each rank of a run gives, a list of dicts."""
        run = Run.of(name)
        assert name in self, f"mark the test with pytest.mark.runs({name!r})"
        if run.layout.ranks > 1 and not HOROVODRUN.exists():
            pytest.skip(needs_horovod.kwargs["reason"])
        self._launch(_start(ALONE))  # first: other layouts load what one process has saved
        self._launch(_start(run.layout))
        if run.task in LATER:
            self._launch(_start(run.layout, run.task))
        if errors := run.errors(self.folder):
            pytest.fail(errors, pytrace=False)
        return run.read(self.folder)

    def _launch(self, start):
        """Launch all runs of a start, unless they have ended.

        While another worker does that, this one launches what is left of the others.
        """
        if self._launch_if_free(start, waits=start == _start(ALONE)):
            return
        others = {_start(run.layout) for run in self._runs} - {start, _start(ALONE)}
        for other in sorted(others):
            self._launch_if_free(other)
        self._launch_if_free(start, waits=True)

    def _launch_if_free(self, start, waits=False):
        """As `_launch`; return whether nobody else was at it."""
        runs = [run for run in self._runs if _start(run.layout, run.task) == start]
        with _locked(self.folder / f"{start}.lock", waits) as is_free:
            if is_free and runs:
                launch_runs(runs[0].layout.ranks, runs, self.folder, self._options)
        return is_free


def _start(layout, task=""):
    """Return a name of the processes that a layout needs, and when a task may begin."""
    name = "alone" if layout.ranks == layout.devices == 1 else f"{layout.ranks}-ranks"
    return name + "-later" * (task in LATER)


@contextlib.contextmanager
def _locked(path, waits):
    """Let one process of several in at a time; give whether this one is, which else does not wait."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def shared_folder(tmp_path_factory):
    """Return a folder that is the same for all workers of pytest-xdist.

    In the one that DTRANSFORMER_RUNS names, runs that have ended are not started again.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_RUNS", folder)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
