"""Runs: a task with a layout, its result files, and its launch."""

import dataclasses
import json
import pathlib

import numpy as np

from harness.launch import launch, tail
from harness.layouts import Layout, parse_layout

SECONDS_OF_A_RUN = 300  # A rank that takes longer prints its stacks and ends.
_SECONDS_TO_START = 120
_RUNS_OF_A_LAUNCH = 60  # Ranks keep some memory of each run until they end.
USED = ".used"  # Suffix of a network's name that also uses it after training.
TIMES = "times.jsonl"  # File with the duration of each run.


@dataclasses.dataclass(frozen=True)
class Run:
    """A task with a layout.

    Args:
        task: Name of a network to train. The suffix `.used` also evaluates, predicts, generates
            and saves with it. Or `"MODULE:TASK"`, a task in the module's dict `TASKS`.
        layout: A `Layout`.
    """

    task: str
    layout: Layout

    @classmethod
    def from_name(cls, name):
        """Return the run with the name "TASK/LAYOUT"."""
        task, layout = name.split("/")
        return cls(task, parse_layout(layout))

    @property
    def name(self):
        return f"{self.task}/{self.layout.name}"

    def result_file(self, folder, rank):
        """Return the path of a rank's results."""
        return pathlib.Path(folder) / f"{self.task}-{self.layout.name}-rank{rank}.npz"

    def error_file(self, folder, rank):
        """Return the path of a failed rank's traceback."""
        return self.result_file(folder, rank).with_suffix(".error")

    def has_ended(self, folder):
        """Return whether all ranks have written results, or any rank an error."""
        return bool(self.errors(folder)) or all(
            self.result_file(folder, rank).exists() for rank in range(self.layout.ranks)
        )

    def errors(self, folder):
        """Return the tracebacks of all failed ranks as a text, empty without errors."""
        files = [self.error_file(folder, rank) for rank in range(self.layout.ranks)]
        return "\n".join(file.read_text() for file in files if file.exists())

    def write(self, folder, rank, results):
        """Write a rank's results: a dict of arrays and JSON values."""
        arrays = {k: v for k, v in results.items() if isinstance(v, np.ndarray)}
        values = {k: v for k, v in results.items() if k not in arrays}
        path = self.result_file(folder, rank)
        with open(path.with_suffix(".part"), "wb") as file:
            np.savez(file, json=json.dumps(values), **arrays)
        path.with_suffix(".part").rename(path)

    def append_times(self, folder, seconds):
        """Append this run's durations, a dict of seconds, to the file of all runs."""
        with open(pathlib.Path(folder) / TIMES, "a") as file:
            file.write(json.dumps({"name": self.name, **seconds}) + "\n")

    def read(self, folder):
        """Return a list with the results of each rank, as dicts."""
        return [_read(self.result_file(folder, rank)) for rank in range(self.layout.ranks)]


def _read(path):
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(arrays.pop("json").item()) | arrays


def launch_runs(num_ranks, runs, folder, options=(), seconds_of_a_run=SECONDS_OF_A_RUN):
    """Execute all runs that have not ended yet, in as few launches as memory allows.

    If ranks die, their current run counts as failed, and the remaining runs are launched again.

    Args:
        num_ranks: Number of ranks.
        runs: List of `Run`s on `num_ranks` ranks.
        folder: Folder for the results.
        options: List of further arguments of harness/rank.py.
        seconds_of_a_run: Seconds until a rank ends.
    """
    # `init` rejects a mesh whose ranks have been in smaller meshes before.
    runs = sorted(runs, key=lambda run: -run.layout.ranks_of_mesh)
    while remaining := [run for run in runs if not run.has_ended(folder)][:_RUNS_OF_A_LAUNCH]:
        arguments = ["-m", "harness.rank", folder, *(run.name for run in remaining)]
        arguments += ["--seconds", seconds_of_a_run, *options]
        try:
            process = launch(
                num_ranks, arguments, _SECONDS_TO_START + seconds_of_a_run * len(remaining)
            )
            output = tail(process.stdout, process.stderr, 20000)
        except TimeoutError as error:
            output = str(error)
        with open(pathlib.Path(folder) / f"{num_ranks}-ranks.log", "a") as file:
            file.write(output)
        if unfinished := [run for run in remaining if not run.has_ended(folder)]:
            unfinished[0].error_file(folder, 0).write_text(
                f"{unfinished[0].name}: the ranks ended without results:\n{output}"
            )
