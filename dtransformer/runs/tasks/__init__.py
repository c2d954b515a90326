"""The tasks: what a run trains, a file each."""

import importlib

from dtransformer.runs.config import RunConfig
from dtransformer.runs.tasks.base import Task


def task_of(config: RunConfig, **places) -> Task:
    """Return the task of a config.

    Args:
        config: the run's config.
        **places: `old_run` and `folder`, as of `Task`.
    """
    module = importlib.import_module(f"dtransformer.runs.tasks.{config.task}")
    return module.TASK(config, **places)
