"""The tiers of the suite: what each is made of, and what it may take.

`make check` has what needs no TensorFlow, and an import of it is an error there. `make test` has all
but the long tests, `make test-long` these, `make test-all` everything. Which tests are long is said
by their mark.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys
import zlib

TESTS = pathlib.Path(__file__).parent
# Seconds on two slow cores. A run that takes longer says so; it does not fail, as machines differ.
LIMITS = {"check": 60, "test": 10 * 60, "long": 3 * 60 * 60}

# Files and folders whose tests need no TensorFlow, but for those with the mark `tensorflow`.
CHECK = (
    "cli/test_schema.py",
    "runs/test_config.py",
    "runs/test_unread.py",
    "datasets/test_documents.py",
    "datasets/test_embedded.py",
    "datasets/test_sgm.py",
    "datasets/test_text.py",
    "datasets/test_wmt14.py",
    "distributed/test_layout_pairs.py",
    "inputs/test_conversion.py",
    "inputs/test_texts.py",
    "inputs/test_yaml.py",
    "layers/test_reference.py",
    "parallel/context_parallel/test_plan.py",
    "parallel/pipeline_parallel/test_schedules.py",
    "parallel/test_config.py",
    "parallel/test_shard_bounds.py",
    "parallel/test_topology.py",
    "parallel/watchdog/test_watch.py",
    "planner",
    "test_docs.py",
    "test_house.py",
    "test_prose.py",
    "test_tiers.py",
    "test_words.py",
)
FRAMEWORKS = ("horovod", "keras", "tensorflow")


def part(text):
    """Return the numbers of K/N, the K-th of N parts."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(f"part {number} of {of}: expected 1 to {of}")
    return number, of


def is_in_part(test, runs, number, of):
    """Return whether a test belongs to a part: with the others of its file, or of its first run.

    Args:
        test: its id.
        runs: the names of the runs of ranks that it reads.
        number, of: which part of how many.
    """
    key = runs[0] if runs else test.partition("::")[0]
    return zlib.crc32(key.encode()) % of == number - 1


def is_in_check(path):
    """Return whether a file or folder has tests that belong to `make check`."""
    places = [TESTS / place for place in CHECK]
    return any(path.is_relative_to(place) or place.is_relative_to(path) for place in places)


class WithoutTensorFlow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Refuses to import TensorFlow, and what imports it; they may be looked for."""

    def install(self):
        assert not imported_frameworks()
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        spec = name in FRAMEWORKS and importlib.machinery.PathFinder.find_spec(name)
        if spec:
            spec.loader = self
        return spec or None

    def exec_module(self, module):
        raise ImportError(
            f"{module.__name__} is imported in `make check`, which needs no TensorFlow: "
            "mark the test with pytest.mark.tensorflow, or take its file out of tests/tiers.py"
        )


def imported_frameworks():
    """Return which of TensorFlow, Keras and Horovod this process has imported, a list."""
    return [name for name in FRAMEWORKS if name in sys.modules]
