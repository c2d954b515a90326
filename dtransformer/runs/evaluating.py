"""`dtransformer evaluate` of any task: loss and metrics of a run on records."""

import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterable

from dtransformer.errors import InputError
from dtransformer.files import beside
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs.config import set_option
from dtransformer.runs.loading import load_trained, open_run
from dtransformer.runs.run import make_trainer


def evaluate_run(
    folder: str | os.PathLike, data: Iterable[str] = (), as_json: bool = False
) -> dict[str, float]:
    """Print loss and metrics of a run's weights, on any number of ranks; all ranks call.

    Args:
        folder: the run's folder.
        data: files of records; those of its `data.dev` by default.
        as_json: whether to print JSON.

    Returns:
        What is printed.

    Raises:
        InputError: the folder or a file is not usable, or there are no records.
    """
    folder = pathlib.Path(folder)
    task = open_run(folder, trained=False)
    if not hasattr(task.config.data, "dev"):
        raise InputError(f"{folder}: translations are evaluated on sentences: give --src and --ref")
    if data:
        set_option(task.config, "data.dev", list(data), "--data")
    task.needed("data", "dev")
    # What is printed is −log p itself.
    task.config.training.label_smoothing = task.config.training.z_loss = 0.0
    # Made where token shards are written, so that a run may lie where nothing else is written.
    name = from_chief(lambda: f".evaluated-{secrets.token_hex(4)}", "evaluate")
    task.folder = beside(folder, name)
    try:
        task.read("dev")
        trainer = make_trainer(task, 1)
        task.before_training(trainer)
        load_trained(task)
        results = task.results(trainer, task.batches("dev"))
    finally:
        if job.is_chief():
            shutil.rmtree(task.folder, ignore_errors=True)
    shown = {name: float(value) for name, value in results.items()}
    lines = (f"{name}: {value:.6g}" for name, value in shown.items())
    job.print_once(json.dumps(shown) if as_json else "\n".join(lines))
    return results
