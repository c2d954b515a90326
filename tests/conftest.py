"""Shared fixtures and hooks: tiers, a clean parallel config, real data and results of ranks."""

import contextlib
import gc
import os
import pathlib
import resource
import subprocess
import sys
import time

import pytest

import dtransformer
from harness.quick import compile_quickly
from tests import durations, tiers
from tests.long_tests import is_long
from tests.shared_runs import (
    SharedRuns,
    launch_in_background,
    requested_runs,
    shared_folder,
)

_START = pytest.StashKey[float]()
_BACKGROUND = pytest.StashKey[subprocess.Popen]()


def pytest_addoption(parser):
    parser.addoption("--tier", choices=tiers.LIMITS, help="see tests/tiers.py")
    parser.addoption(
        "--part", type=tiers.parse_part, metavar="K/N", help="the K-th of N parts of a tier"
    )


def pytest_configure(config):
    config.stash[_START] = time.monotonic()
    tier = config.getoption("tier")
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    if tier == "check":
        tiers.WithoutTensorFlow().install()
    elif tier != "long" and runs_tests:
        compile_quickly()
    runs_all_files = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if tier and runs_all_files and not is_worker:
        folder = lambda: shared_folder(config._tmp_path_factory)
        config.pluginmanager.register(durations.Durations(folder))


def pytest_ignore_collect(collection_path, config):
    """Skip files that import TensorFlow in `make check`, where that is an error."""
    is_ignored = config.getoption("tier") == "check" and not tiers.is_in_check(collection_path)
    return True if is_ignored else None


def deselect(config, items, is_excluded):
    """Remove each test with a true `is_excluded(test)` and report it as deselected."""
    excluded = {item for item in items if is_excluded(item)}
    config.hook.pytest_deselected(items=list(excluded))
    items[:] = [item for item in items if item not in excluded]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the long tests, and run long files first so that all workers end together.

    Files with multi-rank runs come last, because their runs start in the background.
    """
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
    if config.getoption("tier") == "check":
        deselect(config, items, lambda item: item.get_closest_marker("tensorflow"))
    if part := config.getoption("part"):
        is_in_part = lambda item: tiers.is_in_part(item.nodeid, requested_runs([item]), *part)
        deselect(config, items, lambda item: not is_in_part(item))
    seconds = durations.kept()

    files = {}
    for item in items:  # keep the tests of a file together
        files.setdefault(item.path, []).append(item)

    def sort_key(path):
        reads_runs = [item.get_closest_marker("runs") is not None for item in files[path]]
        file_seconds = seconds.get(files[path][0].nodeid.partition("::")[0], 0.0)
        return any(reads_runs), all(reads_runs), -file_seconds, path

    sort_keys = {path: sort_key(path) for path in files}
    items.sort(key=lambda item: sort_keys[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Start the multi-rank runs of all selected tests in the background, once for all workers."""
    names, config = requested_runs(session.items), session.config
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if not names or worker not in (None, "gw0") or config.option.collectonly:
        return
    owner = os.getppid() if worker else os.getpid()
    folder = shared_folder(config._tmp_path_factory)
    background = launch_in_background(folder, names, rank_options(config), owner)
    config.stash[_BACKGROUND] = background


def rank_options(config):
    """Return the arguments of harness/rank.py for a tier."""
    return ["--quick", *["--short"] * (config.getoption("tier") != "long")]


def pytest_terminal_summary(terminalreporter, config):
    """Print the duration and limit of the tier, and the number of tests that did not run."""
    if tier := config.getoption("tier"):
        seconds, limit = time.monotonic() - config.stash[_START], tiers.LIMITS[tier]
        skipped = len(terminalreporter.stats.get("skipped", ()))
        deselected = len(terminalreporter.stats.get("deselected", ()))
        terminalreporter.write_sep(
            "=",
            f"make {tier}: {seconds:.0f} s of {limit} s on two slow cores; not run: "
            f"{skipped} skipped, for the reasons above, and {deselected} of other tiers or parts",
            yellow=seconds > limit,
        )
        if seconds > limit:
            terminalreporter.write_line("WARNING: The tier exceeded its time limit.", yellow=True)


@pytest.fixture(autouse=True)
def clean_state():
    """Restore the default config, seed, precision and tasks, and leave the job after each test."""
    yield
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
    if tasks := sys.modules.get("dtransformer.runs.tasks"):
        for name in list(tasks._REGISTERED):
            for table in (tasks.SECTIONS, tasks.BASE_TASKS, tasks._REGISTERED):
                del table[name]
    if "keras" in sys.modules:
        import keras

        dtransformer.shutdown()
        dtransformer.set_seed(0)
        keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Exclude objects that the tests of a file leave behind from later garbage collections."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_files():
    """Return a context manager that limits the file size, to simulate a full disk."""

    @contextlib.contextmanager
    def limit(num_bytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(scope="session")
def shared_data():
    """Return the folder of real data, or skip the test if it is missing."""
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_DATA", "data/real"))
    if not folder.is_dir():
        pytest.skip(f"No real data in {folder}. Set DTRANSFORMER_DATA to its folder.")
    return folder


@pytest.fixture(scope="session")
def rank_results(request, tmp_path_factory):
    """Return a function from a run's name to the list of its ranks' results."""
    options = rank_options(request.config)
    return SharedRuns(
        shared_folder(tmp_path_factory), requested_runs(request.session.items), options
    )
