"""`dtransformer train` and `dtransformer new`."""

import argparse
import importlib
import sys

from dtransformer.cli.plan import load_device
from dtransformer.errors import InputError, check_installed, short_repr
from dtransformer.planner import Cluster
from dtransformer.planner.machine import this_device
from dtransformer.runs.config import load_config
from dtransformer.runs.depth import make_depth_config
from dtransformer.runs.preview import new_config
from dtransformer.runs.unread import check_read


def train(arguments: argparse.Namespace) -> None:
    """Train the model of a config, or check the config with `--dry-run`.

    Raises:
        InputError: If something in the config or the data is wrong.
    """
    # Report a wrong config before TensorFlow starts, which takes seconds.
    check_read(load_config(arguments.config, arguments.set, needs_task=True))
    importlib.import_module("dtransformer.start")
    if arguments.dry_run:
        preview = importlib.import_module("dtransformer.runs.dry_run")
        return preview.dry_run(
            arguments.config, arguments.set, sys.stdout.isatty(), arguments.overwrite
        )
    profile = _steps(arguments.profile)
    run = importlib.import_module("dtransformer.runs.run")
    run.train(
        arguments.config,
        arguments.set,
        arguments.run,
        arguments.overwrite,
        arguments.resume,
        profile,
    )


def new(arguments: argparse.Namespace) -> None:
    """Print a commented config of a task, with `--depth` also the planner's table.

    Raises:
        InputError: If the task or the device is unknown, or options do not fit together.
    """
    depth = arguments.depth
    device = arguments.device
    devices = arguments.devices
    if depth is None:
        if device or devices:
            raise InputError("--device and --devices require --depth. Add it.")
        text = new_config(arguments.task)
    else:
        kind = load_device(device) if device else this_device(devices or 1)
        text = make_depth_config(arguments.task, depth, Cluster(kind, devices or 1))
    print(text, end="")


def _steps(text):
    """Parse a range of steps such as "3-5" to a (first, last) tuple. `None` stays `None`."""
    if text is None:
        return None
    check_installed("tensorboard", "Profiles")
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise InputError(
            f"--profile must be a range of steps, such as 3-5, got {short_repr(text)}."
        )
    return int(first), int(last)
