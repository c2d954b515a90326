"""`dtransformer evaluate` for every task: compute loss and metrics of a run on held-out records."""

import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterable

from dtransformer.errors import InputError
from dtransformer.files import append_to_name
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs.config import set_option
from dtransformer.runs.loading import open_run
from dtransformer.runs.run import make_trainer
from dtransformer.runs.tasks import load_trained


def evaluate_run(
    folder: str | os.PathLike, data: Iterable[str] = (), as_json: bool = False
) -> dict[str, float]:
    """Print loss and metrics of a run's weights on held-out records.

    The loss excludes label smoothing and z-loss. Any number of ranks can evaluate a run. All ranks
    call this function.

    Args:
        folder: Folder of the run.
        data: Paths of record files. Defaults to the run's `data.dev`.
        as_json: Boolean. Print one line of JSON instead of one line per result.

    Returns:
        Dict of the printed results.

    Raises:
        InputError: If the folder or a file is unusable, or no records are given.
    """
    folder = pathlib.Path(folder)
    task = open_run(folder, trained=False)
    if not hasattr(task.config.data, "dev"):
        raise InputError(f"`{folder}` is a translation run. Add --src and --ref.")
    if data:
        set_option(task.config, "data.dev", list(data), "--data")
    task.require_option("dev")
    # The printed loss is −log p, without regularization.
    task.config.training.label_smoothing = task.config.training.z_loss = 0.0
    # Token shards go to a temporary folder next to the run. It is created only if shards are
    # written, so that other tasks can evaluate runs in a read-only place.
    name = from_chief(lambda: f".evaluated-{secrets.token_hex(4)}", "evaluate")
    task.folder = append_to_name(folder, name)
    try:
        task.read("dev")
        trainer = make_trainer(task, 1)
        task.before_training(trainer)
        load_trained(task)
        results = task.results(trainer, task.batches("dev"))
    finally:
        if job.is_chief():
            shutil.rmtree(task.folder, ignore_errors=True)
    values = {name: float(value) for name, value in results.items()}
    lines = (f"{name}: {value:.6g}" for name, value in values.items())
    job.print_once(json.dumps(values) if as_json else "\n".join(lines))
    return results
