"""A run is a task under a layout: its name, the files with what its ranks give, and its start."""

import dataclasses
import json
import pathlib

import numpy as np

from harness.launch import launch, tail
from harness.layouts import Layout, layout_of

SECONDS_OF_A_RUN = 300  # on a busy machine; a rank that takes longer shows where it is, and ends
_SECONDS_TO_START = 120
_RUNS_OF_A_LAUNCH = 60  # what they leave is in memory until their ranks end
TIMES = "times.jsonl"  # what each run took


@dataclasses.dataclass(frozen=True)
class Run:
    """A task under a layout.

    Args:
        task: a network's name, which is trained, with `.used` if it is also used in every
            other way; or `"MODULE:TASK"`, one of the module's dict `TASKS`.
        layout: a `Layout`.
    """

    task: str
    layout: Layout

    @classmethod
    def of(cls, name):
        """Return the run of a name, "TASK/LAYOUT"."""
        task, layout = name.split("/")
        return cls(task, layout_of(layout))

    @property
    def name(self):
        return f"{self.task}/{self.layout.name}"

    def result_file(self, folder, rank):
        """Return where the results of a rank are."""
        return pathlib.Path(folder) / f"{self.task}-{self.layout.name}-rank{rank}.npz"

    def error_file(self, folder, rank):
        """Return where the traceback of a rank is that has failed."""
        return self.result_file(folder, rank).with_suffix(".error")

    def has_ended(self, folder):
        """Return whether there is what every rank gives, or why one has failed."""
        return bool(self.errors(folder)) or all(
            self.result_file(folder, rank).exists() for rank in range(self.layout.ranks)
        )

    def errors(self, folder):
        """Return why ranks have failed, a text; it is empty where none has."""
        files = [self.error_file(folder, rank) for rank in range(self.layout.ranks)]
        return "\n".join(file.read_text() for file in files if file.exists())

    def write(self, folder, rank, results):
        """Write what a rank gives: a dict of arrays, and of what JSON has."""
        arrays = {k: v for k, v in results.items() if isinstance(v, np.ndarray)}
        others = {k: v for k, v in results.items() if k not in arrays}
        path = self.result_file(folder, rank)
        with open(path.with_suffix(".part"), "wb") as file:
            np.savez(file, json=json.dumps(others), **arrays)
        path.with_suffix(".part").rename(path)

    def append_times(self, folder, seconds):
        """Add what the run took, a dict of seconds, to those of all runs."""
        with open(pathlib.Path(folder) / TIMES, "a") as file:
            file.write(json.dumps({"name": self.name, **seconds}) + "\n")

    def read(self, folder):
        """Return what each rank gives, a list of dicts."""
        return [_read(self.result_file(folder, rank)) for rank in range(self.layout.ranks)]


def _read(path):
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(arrays.pop("json").item()) | arrays


def launch_runs(num_ranks, runs, folder, options=(), seconds_of_a_run=SECONDS_OF_A_RUN):
    """Run all runs that have not ended yet, in as few launches as memory allows.

    Where ranks die, the run that they were in has failed, and they are started again for
    those that are left.

    Args:
        num_ranks: number of ranks.
        runs: list of `Run`s on so many ranks.
        folder: where results are written.
        options: list of further arguments of harness/rank.py.
        seconds_of_a_run: after which a rank ends.
    """
    # `init` refuses a mesh whose ranks were in smaller ones before.
    runs = sorted(runs, key=lambda run: -run.layout.ranks_of_mesh)
    while left := [run for run in runs if not run.has_ended(folder)][:_RUNS_OF_A_LAUNCH]:
        arguments = ["-m", "harness.rank", folder, *(run.name for run in left)]
        arguments += ["--seconds", seconds_of_a_run, *options]
        try:
            done = launch(num_ranks, arguments, _SECONDS_TO_START + seconds_of_a_run * len(left))
            output = tail(done.stdout, done.stderr, 20000)
        except TimeoutError as error:
            output = str(error)
        with open(pathlib.Path(folder) / f"{num_ranks}-ranks.log", "a") as file:
            file.write(output)
        if stopped_in := [run for run in left if not run.has_ended(folder)]:
            stopped_in[0].error_file(folder, 0).write_text(
                f"{stopped_in[0].name}: its ranks have ended without results:\n{output}"
            )
