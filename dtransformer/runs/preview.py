"""Preview of a config without training: `train --dry-run`; and a file to begin with."""

import dataclasses
import inspect
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping

import yaml

from dtransformer.planner.clusters import Cluster
from dtransformer.planner.job import Job
from dtransformer.planner.machine import this_device
from dtransformer.planner.report import fields_of, fit_line
from dtransformer.planner.search import cost, plan
from dtransformer.runs.automatic import batch_of_run, shape_of_run
from dtransformer.runs.config import RunConfig, key_of, load_config
from dtransformer.runs.unread import check_read, is_read

_SHOWN, _GREEN, _PLAIN = 3, "\033[32m", "\033[0m"
_FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)
_COMMON = ("data", "tokenizer", "model", "training", "evaluation", "logs", "export")


def dry_run(
    config_path: str | os.PathLike, settings: Iterable[str] = (), in_color: bool = False
) -> None:
    """Read all that a config names, and print what would be trained; nothing is written or trained.

    Args:
        config_path: a YAML file.
        settings: as of `train`.
        in_color: whether what is learnt is green; else it stands between ⟦ and ⟧.

    Raises:
        InputError: something in the config or the data is wrong.
    """
    config = load_config(config_path, settings)
    check_read(config)
    print(f"Task: {config.task}\n{_planned(config)}")
    data = config.data
    if not (getattr(data, "train", None) or getattr(data, "source", None)):
        print("data is not given, so that none is read")
        return
    from dtransformer.runs.tasks import task_of

    with tempfile.TemporaryDirectory() as folder:
        task = task_of(config, folder=pathlib.Path(folder) / "run")
        task.read()
        print("\n".join(task.told()))
        for record in task.preview(_SHOWN):
            print("".join(_marked(text, learnt, in_color) for text, learnt in record))


def _marked(text, is_learnt, in_color):
    if not is_learnt:
        return text
    return f"{_GREEN}{text}{_PLAIN}" if in_color else f"⟦{text}⟧"


def _planned(config):
    """Return the lines of what a step takes, by the planner, on devices such as this host's."""
    parallel, training = config.parallel, config.training
    degrees = (parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel)
    local = training.local_devices
    number = max(math.prod(degrees) * (parallel.data_parallel or 1), local)
    device = this_device(number)
    cluster = Cluster(device, number, local_devices=local)
    length, rows = batch_of_run(config, number)
    model = shape_of_run(config, length)
    options = training.precision, training.optimizer, fields_of(parallel), bool(training.ema)
    job = Job(rows, *options)
    if training.layout == "auto":
        found = plan(model, cluster, job).best
    else:
        found = cost(model, cluster, job, parallel)
    return (
        f"Model: {model.name}, {model.parameters():,} parameters, of which "
        f"{model.trained_parameters():,} are trained; rows of {length:,} tokens, {rows:,} a step\n"
        f"Layout: {found.layout}, {number} × {device.name}; a step takes about "
        f"{found.step_seconds:.3g} s. {fit_line(found)}"
    )


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
