"""Configs of runs: reading YAML files, applying `--set` options, and checking both."""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Any

import pydantic

from dtransformer.errors import InputError, short_repr, suggest
from dtransformer.inputs.json_file import problem
from dtransformer.inputs.yaml_file import parse_setting, read_yaml, yaml_text
from dtransformer.runs.options import SECTIONS

TRANSLATION = "translation"
_MAX_DEGREE = 4096  # maximum number of ranks, stages or micro-batches
_NO_DEGREE = "parallel.parallel_optimizer_threshold"
_MAX_KEY = 100  # characters of an unknown key that suggestions compare


class RunConfig:
    """All options of a run, with their defaults. The run folder stores them as config.yaml.

    Args:
        task: Name of the task, a key of `SECTIONS`. Defaults to `"translation"`.

    Attributes:
        task: Name of the task.
        data, tokenizer, model, training, parallel, …: Dataclasses of the task's sections.

    Raises:
        InputError: If the task is unknown.
    """

    def __init__(self, task: str = TRANSLATION):
        if not isinstance(task, str) or task not in SECTIONS:
            raise InputError(f"`task`: unknown task {short_repr(task)}; {suggest(task, SECTIONS)}")
        self.task = task
        for name, kind in SECTIONS[task].items():
            setattr(self, name, kind())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and vars(self) == vars(other)

    def sections(self) -> dict[str, Any]:
        """Return a dict of all sections by name."""
        return {name: getattr(self, name) for name in SECTIONS[self.task]}

    def keys(self) -> list[str]:
        """Return the names of all options, each "section.key"."""
        return [
            f"{name}.{yaml_key(field.name)}"
            for name, section in self.sections().items()
            for field in dataclasses.fields(section)
        ]

    def option(self, key: str) -> Any:
        """Return the value of the option `key`, "section.key"."""
        section, name = key.split(".")
        owner = getattr(self, section)
        return getattr(owner, name if hasattr(owner, name) else f"{name}_")


def yaml_key(field: str) -> str:
    """Return the YAML key of a field. Fields named like a Python keyword end with "_": `from_`."""
    return field.rstrip("_")


def load_config(
    path: str | os.PathLike | None = None, settings: Iterable[str] = (), needs_task: bool = False
) -> RunConfig:
    """Read a config file, and replace values.

    Args:
        path: A YAML file. `None` returns the defaults.
        settings: Texts "section.key=value" that replace values of the file.
        needs_task: Whether to refuse a config that has neither a task nor data, such as
            the layout of `dtransformer plan`.

    Raises:
        InputError: If the file is missing or not YAML, a key is unknown, a value is wrong,
            or `needs_task` is set and the config has neither a task nor data.
    """
    content = read_yaml(path) if path is not None else {}
    if not isinstance(content, dict | None):
        raise InputError(f"{path}: expected sections with keys, got a {type(content).__name__}.")
    options = [(key, value, str(path)) for key, value in _flat(content or {})]
    options += [(*parse_setting(text, "--set", "section.key=value"), "--set") for text in settings]
    sections = {key.partition(".")[0] for key, _, _ in options}
    if needs_task and sections.isdisjoint(("task", "data")):
        raise InputError(
            f"{path}: expected `task`, `data` and `model`, got {', '.join(sections) or 'no sections'}. "
            "`dtransformer new causal_lm` prints an example."
        )
    config = RunConfig({"task": TRANSLATION, **{key: value for key, value, _ in options}}["task"])
    for key, value, origin in options:
        if (key, value) == ("parallel", "auto"):
            config.training.layout = "auto"
        elif key not in config.sections():
            if key != "task":
                set_option(config, key, value, origin)
        elif value not in (None, {}):
            expected = "be `auto` or " if key == "parallel" else ""
            raise InputError(
                f"{origin}: section `{key}` must {expected}contain keys and values, got "
                f"{short_repr(value)}."
            )
    return config


def _flat(content):
    """Yield the options of a file as ("section.key", value), and sections without keys as they are."""
    for section, values in content.items():
        if isinstance(values, dict) and values:
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values


def save_config(config: RunConfig, path: str | os.PathLike) -> None:
    """Write all options of a run to a YAML file."""
    from dtransformer.inputs.files import write_text_atomically

    content = {"task": config.task}
    for name, section in config.sections().items():
        fields = dataclasses.asdict(section)
        content[name] = {yaml_key(field): value for field, value in fields.items()}
    write_text_atomically(path, yaml_text(content))


def set_option(config: RunConfig, key: str, value: object, origin: str) -> None:
    """Validate a value and set an option of a run to it.

    Args:
        config: Config to change.
        key: "section.key", or "section.key.field" if the option was already set to a mapping.
        value: Value in the form of parsed YAML.
        origin: Source of the value, such as a path. Error messages begin with it.

    Raises:
        InputError: If the option is unknown or the value is invalid.
    """
    keys = config.keys()
    (outer, _, inner) = key.rpartition(".")
    if outer in keys and dataclasses.is_dataclass(nested := config.option(outer)):
        return set_option(config, outer, {**dataclasses.asdict(nested), inner: value}, origin)
    if key not in keys:
        raise InputError(
            f"{origin}: unknown key `{key[:_MAX_KEY]}` with value {short_repr(value)}. "
            f"{_nearest(config, key)}"
        )
    section, name = key.split(".")
    owner = getattr(config, section)
    field = next(f.name for f in dataclasses.fields(owner) if yaml_key(f.name) == name)
    if key == "training.jit_compile" and value in ("true", "false"):  # Old runs stored texts.
        value = value == "true"
    try:
        is_degree = section == "parallel" and key != _NO_DEGREE
        if is_degree and type(value) is int and value > _MAX_DEGREE:
            raise ValueError(f"{name} must be at most {_MAX_DEGREE}, got {value}")
        setattr(owner, field, value)
    except pydantic.ValidationError as error:
        is_nested = error.errors()[0]["type"] == "value_error"
        colon = ":" if is_nested else ""
        raise InputError(f"{origin}: `{key}`{colon} {problem(error)[1]}.") from None
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        text = str(error).removeprefix(f"{name} ")
        if key in text:
            raise InputError(f"{origin}: {text}") from None
        colon = ":" if text == str(error) else ""
        raise InputError(f"{origin}: `{key}`{colon} {text}.") from None


def _nearest(config, key):
    """Return a hint for an unknown key: a task that has it, a similar key, or all sections."""
    keys = config.keys()
    key = key[:_MAX_KEY]
    sections = config.sections()
    names = {name.split(".")[-1]: name for name in reversed(keys)}
    other_tasks = [
        name for name in SECTIONS if key in RunConfig(name).keys() and name != config.task
    ]
    if other_tasks and key.split(".")[-1] not in names:
        return (
            f"Task {config.task} does not have this key, but task {other_tasks[0]} does. Is "
            f"`task: {other_tasks[0]}` missing?"
        )
    candidates = keys if "." in key else [*sections, *keys]
    close = difflib.get_close_matches(key, candidates, n=1)
    close = close or difflib.get_close_matches(key.split(".")[-1], names, n=1, cutoff=0.55)
    if close:
        return f"Did you mean `{names.get(close[0], close[0])}`?"
    section = key.split(".")[0]
    if section in sections and "." in key:
        fields = dataclasses.fields(sections[section])
        return f"Keys of {section}: {', '.join(yaml_key(field.name) for field in fields)}"
    return f"Sections: {', '.join(sections)}"
