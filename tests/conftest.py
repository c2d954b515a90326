"""What all tests share: a clean parallel config, the place of the real data, ranks' results."""

import contextlib
import gc
import os
import pathlib
import resource

import keras
import pytest

import dtransformer
from tests.shared_runs import SharedRuns, read_by, shared_folder

# The file that starts most ranks; meanwhile other workers do what needs none.
FIRST = "test_parity.py"


def pytest_collection_modifyitems(items):
    """Let long files come before short ones, so that the workers of pytest-xdist end together."""

    def place(item):
        reads_runs = item.get_closest_marker("runs") is not None
        return item.path.name != FIRST, reads_runs, -item.path.stat().st_size, item.path

    places = {}
    for item in items:  # all tests of a file together
        places[item.path] = min(place(item), places.get(item.path, place(item)))
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True)
def clean_state():
    """Every test starts outside of a job, with the default config, seed and precision."""
    yield
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
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
    return SharedRuns(shared_folder(tmp_path_factory), read_by(request.session.items))
