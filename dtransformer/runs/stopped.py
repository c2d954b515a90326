"""Explain an interrupted or failed training, and how to continue it."""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Iterable, Iterator

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel.config.elastic_config import LAUNCHER
from dtransformer.parallel.runtime import job
from dtransformer.planner.report import plan_to_text
from dtransformer.runs.automatic import plan_run
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import CHECKPOINTS
from dtransformer.trainers.checkpoint.folders import saved_steps


@contextlib.contextmanager
def explained(
    config: RunConfig, config_path: str | os.PathLike, folder: pathlib.Path, settings: Iterable[str]
) -> Iterator[None]:
    """Inside the `with` block, add an explanation to Ctrl-C and to out-of-memory errors.

    Args:
        config: Config of the run.
        config_path: Path of the config file.
        folder: Folder of the run.
        settings: Texts of `--set`.

    Raises:
        KeyboardInterrupt: With the newest checkpoint, and the command that resumes from it.
        InputError: If the memory of a device is full. Rank 0 prints the planner's table.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_describe_saved(config_path, folder, settings)) from None
    except tf.errors.ResourceExhaustedError as error:
        with contextlib.suppress(InputError):  # The planner may not know the GPU.
            if job.is_chief():
                print(plan_to_text(plan_run(config, fixed={})), file=sys.stderr, flush=True)
        raise InputError(
            "The memory of a device is full. Set `parallel: auto` to use the first layout in the "
            "planner's table, which rank 0 prints, or reduce batch_size."
        ) from error


def _describe_saved(config_path, folder, settings):
    steps = saved_steps(folder / CHECKPOINTS)
    if not steps:
        return "interrupted before the first checkpoint, so that nothing was saved"
    command = ["dtransformer", "train", "--config", str(config_path), "--run", str(folder)]
    if settings:
        command += ["--set", *settings]
    step, path = steps[-1]
    resume = f"{os.environ.get(LAUNCHER, '')}{shlex.join([*command, '--resume'])}"
    return f"interrupted; the newest checkpoint has {step} steps ({path}). Resume with: {resume}"
