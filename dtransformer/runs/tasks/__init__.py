"""Tasks: one module per built-in task, and a registry for custom tasks."""

import importlib

from dtransformer.errors import InputError
from dtransformer.runs.config import RunConfig
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import LIKE

_REGISTERED: dict[str, type[Task]] = {}  # classes of registered tasks by name


def register_task(name: str, kind: type[Task], like: str) -> None:
    """Register a custom task, so that configs can contain `task: NAME`.

    Configs do not import code. Every program that trains, evaluates or loads a run of the task must
    therefore register it first, and can then call `dtransformer.cli.main()`.

    Args:
        name: Name of the task in configs.
        kind: Subclass of `Task`. Deriving from a built-in task, such as `causal_lm.LanguageModel`,
            saves most of the work.
        like: Name of the task whose sections and keys the configs of the new task have.

    Raises:
        InputError: If `name` is a built-in task, `like` is unknown, or `kind` is not a subclass of
            `Task`.
    """
    RunConfig(like)
    if name in SECTIONS and name not in _REGISTERED:
        raise InputError(f"Task {name} is built in. Register your task with another name.")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise InputError(f"Task {name} must be a subclass of Task, got {kind!r}.")
    SECTIONS[name] = SECTIONS[like]
    LIKE[name] = like
    _REGISTERED[name] = kind


def class_of(config: RunConfig) -> type[Task]:
    """Return the `Task` subclass of a config's task."""
    if config.task in _REGISTERED:
        return _REGISTERED[config.task]
    return importlib.import_module(f"dtransformer.runs.tasks.{config.task}").TASK


def task_of(config: RunConfig, **places) -> Task:
    """Create the task of a config.

    Args:
        config: Config of the run.
        **places: `old_run` and `folder`, see `Task`.
    """
    return class_of(config)(config, **places)
