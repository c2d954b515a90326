"""The tasks: what a run trains, a file each; and those of a program of one's own."""

import importlib

from dtransformer.errors import InputError
from dtransformer.runs.config import RunConfig
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import LIKE

_OWN: dict[str, type[Task]] = {}  # of programs, by their names


def register_task(name: str, kind: type[Task], like: str) -> None:
    """Let configs have a task of one's own, in the process that calls.

    The program that trains it registers it before it runs a command: `dtransformer.cli.main()`. So
    does one that evaluates or loads such a run: a config names no code that would be imported.

    Args:
        name: what configs call it.
        kind: its class; one of a task's file, such as `causal_lm.LanguageModel`, saves most of it.
        like: the task whose sections and keys its configs have.

    Raises:
        InputError: the library has a task of that name, or none that is called `like`.
    """
    RunConfig(like)
    if name in SECTIONS and name not in _OWN:
        raise InputError(f"task {name} is the library's own: register yours by another name")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise InputError(f"task {name}: expected a class that derives from Task, got {kind!r}")
    SECTIONS[name], LIKE[name], _OWN[name] = SECTIONS[like], like, kind


def class_of(config: RunConfig) -> type[Task]:
    """Return the class of a config's task."""
    if config.task in _OWN:
        return _OWN[config.task]
    return importlib.import_module(f"dtransformer.runs.tasks.{config.task}").TASK


def task_of(config: RunConfig, **places) -> Task:
    """Return the task of a config.

    Args:
        config: the run's config.
        **places: `old_run` and `folder`, as of `Task`.
    """
    return class_of(config)(config, **places)
