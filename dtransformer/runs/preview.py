"""The commented config file that `dtransformer new TASK` prints."""

import dataclasses
import inspect
import re
from collections.abc import Mapping

import yaml

from dtransformer.runs.config import RunConfig, key_of
from dtransformer.runs.unread import is_read

_FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)
_COMMON = ("data", "tokenizer", "model", "training", "evaluation", "logs", "export")


def new_config(task: str, options: Mapping[str, Mapping] | None = None) -> str:
    """Return a commented file for a task, which `load_config` takes.

    Args:
        task: its name.
        options: what the file begins with, by section and key; by default the names of data.

    Raises:
        InputError: there is no such task.
    """
    config, lines = RunConfig(task), [f"task: {task}"]
    for name, section in config.sections().items():
        if name not in _COMMON and name != "search":
            continue
        lines += ["", f"# {inspect.getdoc(type(section)).splitlines()[0]}", f"{name}:"]
        told = fields_told(type(section))
        for field in dataclasses.fields(section):
            if not is_read(task, f"{name}.{key_of(field.name)}"):
                continue
            value = yaml.safe_dump(dataclasses.asdict(section)[field.name]).splitlines()[0]
            lines.append(
                f"  # {key_of(field.name)}: {value}  # {told.get(field.name, '')}".rstrip(" #")
            )
        starts = _STARTS.get(name, {})
        own = starts.get(task, starts.get("*"))
        if options and name in options:
            own = "\n  ".join(f"{key}: {value}" for key, value in options[name].items())
        lines += [f"  {own}"] if own else []
    return "\n".join(lines) + "\n"


# What the files begin with, by section and task.
_STARTS = {
    "data": {
        "*": "train: data/train.jsonl",
        "causal_lm": "train: data/train.txt",
        "translation": "source: data/train.en\n  target: data/train.fr",
    },
    "model": {"*": "from: models/mine", "translation": None},
}


def fields_told(owner: type) -> dict[str, str]:
    """Return what the comments of a dataclass' fields say, those of its bases first."""
    told = {}
    for kind in reversed(owner.__mro__[:-1]):
        told |= dict(_FIELD.findall(inspect.getsource(kind)))
    return told
