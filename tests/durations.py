"""Durations of test files and multi-rank runs: recorded by a tier and used to order tests.

A tier writes `build/durations.tsv`. A copy from a quiet machine, `tests/durations.tsv`, decides the
order of the tests: the longest files run first, so that all workers end together.
"""

import collections
import json
import pathlib

from harness.runs import TIMES

ROOT = pathlib.Path(__file__).parents[1]
KEPT = ROOT / "tests/durations.tsv"
WRITTEN = ROOT / "build/durations.tsv"
PHASES = ("start", "first_step", "rest")
"""Timed phases of a run. `harness/rank.py` records them in seconds."""


def kept():
    """Return the seconds of each test file as a dict. It is empty if the table is missing."""
    if not KEPT.exists():
        return {}
    rows = [line.split("\t") for line in KEPT.read_text("utf-8").splitlines()]
    return {row[0]: float(row[2]) for row in rows if row[0].endswith(".py")}


class Durations:
    """Pytest plugin that records the duration of each test file and run.

    Args:
        folder: Function without arguments that returns the path of the folder of runs.
    """

    def __init__(self, folder):
        self.folder = folder
        self.seconds, self.tests = collections.Counter(), collections.Counter()

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "call"

    def pytest_sessionfinish(self):
        if not self.tests:
            return
        rows = [
            (file, str(self.tests[file]), f"{seconds:.1f}")
            for file, seconds in self.seconds.most_common()
        ]
        WRITTEN.parent.mkdir(exist_ok=True)
        lines = ["\t".join(row) for row in [("file", "tests", "seconds"), *rows, *self._runs()]]
        WRITTEN.write_text("\n".join(lines) + "\n", "utf-8")

    def _runs(self):
        """Return a table with rank 0's seconds in each run, longest run first."""
        path = self.folder() / TIMES
        runs = [json.loads(line) for line in path.open()] if path.exists() else []
        runs.sort(key=lambda run: -sum(run[part] for part in PHASES))
        rows = [(run["name"], *(f"{run[part]:.1f}" for part in (*PHASES, "cpu"))) for run in runs]
        return [("run", *PHASES, "processor"), *rows] if rows else []
