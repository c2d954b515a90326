"""Seconds that files of tests and runs of ranks take: written by a tier, and read for the order.

`build/durations.tsv` is written; `tests/durations.tsv` is the one of a quiet machine, a copy, which
is read: files that take longest come first, so that all workers end together.
"""

import collections
import json
import pathlib

from harness.runs import TIMES

ROOT = pathlib.Path(__file__).parents[1]
KEPT = ROOT / "tests/durations.tsv"
WRITTEN = ROOT / "build/durations.tsv"
PARTS = ("start", "first_step", "rest")  # of a run of ranks, in seconds: harness/rank.py


def kept():
    """Return a dict of the seconds that each file of tests takes; empty without a table."""
    if not KEPT.exists():
        return {}
    rows = [line.split("\t") for line in KEPT.read_text("utf-8").splitlines()]
    return {row[0]: float(row[2]) for row in rows if row[0].endswith(".py")}


class Durations:
    """A plugin of pytest: adds up what tests take, file by file.

    Args:
        folder: a function that returns where the runs' times are, a path.
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
        """Return a row for each run: what rank 0 took of it, longest first."""
        path = self.folder() / TIMES
        runs = [json.loads(line) for line in path.open()] if path.exists() else []
        runs.sort(key=lambda run: -sum(run[part] for part in PARTS))
        rows = [(run["name"], *(f"{run[part]:.1f}" for part in (*PARTS, "cpu"))) for run in runs]
        return [("run", *PARTS, "processor"), *rows] if rows else []
