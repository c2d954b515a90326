"""The config of a run: YAML files, `--set` options, and their checks."""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Any

import pydantic

from dtransformer.errors import InputError, nearest, shown
from dtransformer.inputs.json_file import problem
from dtransformer.inputs.yaml_file import parse_setting, read_yaml, yaml_text
from dtransformer.runs.options import SECTIONS

TRANSLATION = "translation"
_MAX_DEGREE = 4096  # of what counts ranks, stages and micro-batches
_NO_DEGREE = "parallel.parallel_optimizer_threshold"
_MAX_KEY = 100  # characters that are compared with the names of options


class RunConfig:
    """All options of a run, as its folder keeps them in config.yaml.

    Args:
        task: what is trained, one of `SECTIONS`.

    Attributes:
        task: as given.
        data, tokenizer, model, training, parallel, …: the sections of the task, dataclasses.

    Raises:
        InputError: there is no such task.
    """

    def __init__(self, task: str = TRANSLATION):
        if not isinstance(task, str) or task not in SECTIONS:
            raise InputError(f"`task`: unknown task {shown(task)}; {nearest(task, SECTIONS)}")
        self.task = task
        for name, kind in SECTIONS[task].items():
            setattr(self, name, kind())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and vars(self) == vars(other)

    def sections(self) -> dict[str, Any]:
        """Return the sections by their names."""
        return {name: getattr(self, name) for name in SECTIONS[self.task]}

    def keys(self) -> list[str]:
        """Return the names of all options, "section.key"."""
        return [
            f"{name}.{key_of(field.name)}"
            for name, section in self.sections().items()
            for field in dataclasses.fields(section)
        ]

    def option(self, key: str) -> Any:
        """Return the value of an option, "section.key"."""
        section, name = key.split(".")
        owner = getattr(self, section)
        return getattr(owner, name if hasattr(owner, name) else f"{name}_")


def key_of(field: str) -> str:
    """Return what YAML calls a field: one that Python has a word for ends with "_" here."""
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
            or the config does not say what to train.
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
                f"{origin}: section `{key}` must {expected}contain keys and values, got {shown(value)}."
            )
    return config


def _flat(content):
    """Yield the options of a file, "section.key" and value, and sections without keys."""
    for section, values in content.items():
        if isinstance(values, dict) and values:
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values


def save_config(config: RunConfig, path: str | os.PathLike) -> None:
    """Write the options of a run as YAML."""
    from dtransformer.inputs.files import write_text_atomically

    content = {
        name: {key_of(field): value for field, value in dataclasses.asdict(section).items()}
        for name, section in config.sections().items()
    }
    write_text_atomically(path, yaml_text({"task": config.task, **content}))


def set_option(config: RunConfig, key: str, value: object, origin: str) -> None:
    """Set an option of a run, checked.

    Args:
        config: the config.
        key: "section.key", or "section.key.field" of one that is a mapping and was set before.
        value: as YAML has it.
        origin: where it comes from, for messages.

    Raises:
        InputError: there is no such option, or it may not have this value.
    """
    known, (outer, _, inner) = config.keys(), key.rpartition(".")
    if outer in known and dataclasses.is_dataclass(own := config.option(outer)):
        return set_option(config, outer, {**dataclasses.asdict(own), inner: value}, origin)
    if key not in known:
        raise InputError(
            f"{origin}: unknown key `{key[:_MAX_KEY]}` with value {shown(value)}. "
            f"{_nearest(config, key)}"
        )
    section, name = key.split(".")
    owner = getattr(config, section)
    field = next(f.name for f in dataclasses.fields(owner) if key_of(f.name) == name)
    if key == "training.jit_compile" and value in ("true", "false"):  # as runs were saved once
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
    """Return a hint at the known key that is nearest to one that is not known."""
    keys, key, sections = config.keys(), key[:_MAX_KEY], config.sections()
    names = {name.split(".")[-1]: name for name in reversed(keys)}
    others = [name for name in SECTIONS if key in RunConfig(name).keys() and name != config.task]
    if others and key.split(".")[-1] not in names:
        return (
            f"Task {config.task} does not have this key, but task {others[0]} does. Is "
            f"`task: {others[0]}` missing?"
        )
    known = keys if "." in key else [*sections, *keys]
    close = difflib.get_close_matches(key, known, n=1)
    close = close or difflib.get_close_matches(key.split(".")[-1], names, n=1, cutoff=0.55)
    if close:
        return f"Did you mean `{names.get(close[0], close[0])}`?"
    section = key.split(".")[0]
    if section in sections and "." in key:
        fields = dataclasses.fields(sections[section])
        return f"Keys of {section}: {', '.join(key_of(field.name) for field in fields)}"
    return f"Sections: {', '.join(sections)}"
