"""Tasks: one module per built-in task, a registry for custom tasks, and tasks of trained runs."""

import importlib
import os
import pathlib

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.inputs.weights_file import load_weights
from dtransformer.models.lora_folder import load_lora
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import ADAPTERS, WEIGHTS
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.run_files import check_run
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import BASE_TASKS
from dtransformer.runs.unread import get_base_task as builtin_task

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
    BASE_TASKS[name] = like
    _REGISTERED[name] = kind


def get_task_class(config: RunConfig) -> type[Task]:
    """Return the `Task` subclass of a config's task."""
    if config.task in _REGISTERED:
        return _REGISTERED[config.task]
    return importlib.import_module(f"dtransformer.runs.tasks.{config.task}").TASK


def make_task(config: RunConfig, **places) -> Task:
    """Create the task of a config.

    Args:
        config: Config of the run.
        **places: `old_run` and `folder`, see `Task`.
    """
    return get_task_class(config)(config, load_run=load_run, **places)


def load_run(
    folder: str | os.PathLike,
    precision: str = "float32",
    task: str | None = None,
    trained: bool = True,
) -> Task:
    """Load a run. All ranks call it.

    Args:
        folder: Path of the run folder.
        precision: Name of the dtype policy of the network. Its weights are float32, except with
            `"bfloat16"`.
        task: Name of the expected task. `None` accepts every task.
        trained: Boolean. Load the run's weights. Otherwise the network has its initial weights.

    Returns:
        A `Task` with tokenizer and network. Records are not read.

    Raises:
        InputError: If the folder or a file in it is missing or damaged, belongs to another run, or
            has another task.
    """
    folder = pathlib.Path(folder)
    config = check_run(folder)
    if task is not None and builtin_task(config.task) != task:
        raise InputError(f"`{folder}` is a run of task {config.task}, expected task {task}.")
    loaded = make_task(config, old_run=folder, folder=folder)
    loaded.load_tokenizer(folder)
    loaded.make_network(precision)
    if trained and _compat.initializes_variables():
        load_trained(loaded)
    return loaded


def load_trained(task: Task) -> None:
    """Load the run's weights or adapters into the network of its task. All ranks call it."""
    folder = task.old_run
    if (folder / ADAPTERS).exists():
        load_lora(task.core, folder / ADAPTERS)
    else:
        load_weights(task.network, folder / WEIGHTS)
