"""`dtransformer train` and `dtransformer new`."""

import argparse
import importlib
import sys

from dtransformer.cli.plan import device_of
from dtransformer.errors import InputError, check_installed, shown
from dtransformer.planner import Cluster
from dtransformer.planner.machine import this_device
from dtransformer.runs.depth import config_of_depth
from dtransformer.runs.preview import new_config


def train(arguments: argparse.Namespace) -> None:
    """Train the model of a config, or check the config with `--dry-run`.

    Raises:
        InputError: If something in the config or the data is wrong.
    """
    if arguments.dry_run:
        preview = importlib.import_module("dtransformer.runs.dry_run")
        options = arguments.set, sys.stdout.isatty(), arguments.overwrite
        return preview.dry_run(arguments.config, *options)
    profile = _steps(arguments.profile)
    run = importlib.import_module("dtransformer.runs.run")
    places = arguments.run, arguments.overwrite, arguments.resume
    run.train(arguments.config, arguments.set, *places, profile)


def new(arguments: argparse.Namespace) -> None:
    """Print a config to begin with, with the planner's table where a depth is given.

    Raises:
        InputError: there is no such task or device, or what is asked does not go together.
    """
    depth, device, devices = arguments.depth, arguments.device, arguments.devices
    if depth is None and (device or devices):
        raise InputError("--device and --devices are of the table of --depth: give it, too")
    if depth is None:
        text = new_config(arguments.task)
    else:
        kind = device_of(device) if device else this_device(devices or 1)
        text = config_of_depth(arguments.task, depth, Cluster(kind, devices or 1))
    print(text, end="")


def _steps(text):
    """Return the first and the last step of a text such as "3-5"; None of None."""
    if text is None:
        return None
    check_installed("tensorboard", "profiles")
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise InputError(f"--profile {shown(text)}: expected two numbers of steps, such as 3-5")
    return int(first), int(last)
