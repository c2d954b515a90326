"""The commented config file that `dtransformer new TASK` prints."""

import dataclasses
import inspect
from collections.abc import Mapping

import yaml

from dtransformer.runs.config import RunConfig, yaml_key
from dtransformer.runs.descriptions import field_descriptions
from dtransformer.runs.unread import is_read


def new_config(task: str, options: Mapping[str, Mapping] | None = None) -> str:
    """Return a commented YAML config that `load_config` can read.

    Args:
        task: Name of the task.
        options: Values to set, by section and key. Defaults to the paths of data and model.

    Raises:
        InputError: If the task is unknown.
    """
    config = RunConfig(task)
    lines = [f"task: {task}"]
    for name, section in config.sections().items():
        if name == "parallel":
            continue
        lines += ["", f"# {inspect.getdoc(type(section)).splitlines()[0]}", f"{name}:"]
        descriptions = field_descriptions(type(section))
        for field in dataclasses.fields(section):
            if not is_read(task, f"{name}.{yaml_key(field.name)}"):
                continue
            value = yaml.safe_dump(dataclasses.asdict(section)[field.name]).splitlines()[0]
            lines.append(f"  # {yaml_key(field.name)}: {value}  # {descriptions[field.name]}")
        starts = _STARTS.get(name, {})
        options_text = starts.get(task, starts.get("*"))
        if options and name in options:
            options_text = "\n  ".join(f"{key}: {value}" for key, value in options[name].items())
        lines += [f"  {options_text}"] if options_text else []
    if not options:
        lines += [
            "",
            "# Layout on several devices; auto lets the planner choose.",
            "# parallel: auto",
        ]
    return "\n".join(lines) + "\n"


# Values to set by default, by section and task.
_STARTS = {
    "data": {
        "*": "train: data/train.jsonl",
        "causal_lm": "train: data/train.txt",
        "translation": "source: data/train.en\n  target: data/train.fr",
    },
    "model": {"*": "from: models/mine", "translation": None},
}
