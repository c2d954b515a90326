"""Shared by all tests: tiers, a clean parallel config, the place of the real data, ranks' results."""

import contextlib
import gc
import os
import pathlib
import resource
import sys
import time

import pytest

import dtransformer
from harness.quick import compile_quickly
from tests import durations, tiers
from tests.long_tests import is_long
from tests.shared_runs import SharedRuns, read_by, shared_folder

# The file that starts most ranks; meanwhile other workers do what needs none.
FIRST = "test_parity.py"
AFTER_SECONDS = 20.0  # files that take longer come before the other ranks
_BEGIN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--tier", choices=tiers.LIMITS, help="see tests/tiers.py")
    parser.addoption("--part", type=tiers.part, metavar="K/N", help="the K-th of N parts of a tier")


def pytest_configure(config):
    config.stash[_BEGIN] = time.monotonic()
    tier = config.getoption("tier")
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    if tier == "check":
        tiers.WithoutTensorFlow().install()
    elif tier != "long" and runs_tests:
        compile_quickly()
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if tier and is_whole and not is_worker:
        folder = lambda: shared_folder(config._tmp_path_factory)
        config.pluginmanager.register(durations.Durations(folder))


def pytest_ignore_collect(collection_path, config):
    """Look into no file that imports TensorFlow, where that is an error."""
    leaves_out = config.getoption("tier") == "check" and not tiers.is_in_check(collection_path)
    return True if leaves_out else None


def leave_out(config, items, is_left_out):
    """Take those tests out of a list for which a function says so, and tell it."""
    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the long tests, and let long files come first, so that all workers end together."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
    if config.getoption("tier") == "check":
        leave_out(config, items, lambda item: item.get_closest_marker("tensorflow"))
    if part := config.getoption("part"):
        is_own = lambda item: tiers.is_in_part(item.nodeid, read_by([item]), *part)
        leave_out(config, items, lambda item: not is_own(item))
    seconds = durations.kept()

    files = {}
    for item in items:  # all tests of a file together
        files.setdefault(item.path, []).append(item)

    def place(path):
        reads_runs = [item.get_closest_marker("runs") is not None for item in files[path]]
        taken = seconds.get(files[path][0].nodeid.partition("::")[0], 0.0)
        # Most of that is spent waiting for ranks, whose turn comes after that of what they wait for.
        taken = min(taken, AFTER_SECONDS) if any(reads_runs) else taken
        return path.name != FIRST, all(reads_runs), -taken, path

    places = {path: place(path) for path in files}
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter, config):
    """Print what the tier took beside its limit, and what was not run."""
    if tier := config.getoption("tier"):
        seconds, limit = time.monotonic() - config.stash[_BEGIN], tiers.LIMITS[tier]
        skipped = len(terminalreporter.stats.get("skipped", ()))
        left_out = len(terminalreporter.stats.get("deselected", ()))
        terminalreporter.write_sep(
            "=",
            f"make {tier}: {seconds:.0f} s of {limit} s on two slow cores; not run: "
            f"{skipped} skipped, for the reasons above, and {left_out} of other tiers or parts",
            yellow=seconds > limit,
        )
        if seconds > limit:
            terminalreporter.write_line("WARNING: it took longer than its limit", yellow=True)


@pytest.fixture(autouse=True)
def clean_state():
    """Every test starts outside of a job, with the default config, seed and precision, and our tasks."""
    yield
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
    if tasks := sys.modules.get("dtransformer.runs.tasks"):
        for name in list(tasks._REGISTERED):
            for table in (tasks.SECTIONS, tasks.LIKE, tasks._REGISTERED):
                del table[name]
    if "keras" in sys.modules:
        import keras

        dtransformer.shutdown()
        dtransformer.set_seed(0)
        keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """What a file's tests leave, most of it TensorFlow's, is not searched for garbage once more."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_files():
    """A context in which this process writes no file larger than some bytes, as on a full disk."""

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
    """The folder of real data; skips where it is absent."""
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_DATA", "data/real"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; name its place with DTRANSFORMER_DATA")
    return folder


@pytest.fixture(scope="session")
def ranks_of(request, tmp_path_factory):
    """A function of a run's name that returns what each of its ranks gives."""
    options = ["--quick", *["--short"] * (request.config.getoption("tier") != "long")]
    return SharedRuns(shared_folder(tmp_path_factory), read_by(request.session.items), options)
