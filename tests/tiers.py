"""Tiers of the test suite: their tests and time limits.

`make check` runs the tests that need no TensorFlow, and an import of TensorFlow raises there.
`make test` runs all tests except long ones (mark `long`). `make test-long` runs the long tests,
and `make test-all` runs everything.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys
import zlib

TESTS = pathlib.Path(__file__).parent
# Limits in seconds on two slow cores. A slower run only warns, because machines differ.
LIMITS = {"check": 60, "test": 10 * 60, "long": 3 * 60 * 60}

# Files and folders whose tests need no TensorFlow, except for tests with the mark `tensorflow`.
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
    "parallel/keras_layers/test_rules.py",
    "parallel/pipeline_parallel/test_schedules.py",
    "parallel/test_config.py",
    "parallel/test_shard_bounds.py",
    "parallel/test_topology.py",
    "parallel/watchdog/test_watch.py",
    "planner",
    "test_docs.py",
    "test_house.py",
    "test_prose.py",
    "test_shared_runs.py",
    "test_tiers.py",
)
FRAMEWORKS = ("horovod", "keras", "tensorflow")


def parse_part(text):
    """Parse "K/N", the K-th of N parts, into an `(index, count)` tuple. The index starts at 1."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(f"part {index} of {count}: expected 1 to {count}")
    return index, count


def is_in_part(test, runs, index, count):
    """Return whether a test belongs to a part of the suite.

    Tests that read the same first run share a part, and so do the other tests of a file.

    Args:
        test: Test id.
        runs: Names of the multi-rank runs that the test reads.
        index: Part, from 1.
        count: Number of parts.
    """
    key = runs[0] if runs else test.partition("::")[0]
    return zlib.crc32(key.encode()) % count == index - 1


def is_in_check(path):
    """Return whether a file or folder contains tests of `make check`."""
    places = [TESTS / place for place in CHECK]
    return any(path.is_relative_to(place) or place.is_relative_to(path) for place in places)


class WithoutTensorFlow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that raises if TensorFlow, Keras or Horovod is imported.

    `importlib.util.find_spec` still finds the packages.
    """

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
            f"`make check` must not import {module.__name__}. Mark the test with "
            "pytest.mark.tensorflow, or remove its file from tests/tiers.py."
        )


def imported_frameworks():
    """Return the list of frameworks that this process has imported."""
    return [name for name in FRAMEWORKS if name in sys.modules]
