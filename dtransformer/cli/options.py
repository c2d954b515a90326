"""Options of the command line: checked where they are read, and refused in one line."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from dtransformer.errors import InputError
from dtransformer.inputs.paths import check_path
from dtransformer.inputs.text import check_whole
from dtransformer.inputs.yaml_file import parse_yaml
from dtransformer.runs.config import RunConfig, set_option


class Parser(argparse.ArgumentParser):
    """A parser that raises an InputError, and takes no beginnings of options for them.

    Of a mistyped `--over` argparse would make `--overwrite`. All texts are paths here but a `Text`.
    """

    def __init__(self, **kwargs):
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_args(self, args=None, namespace=None):
        parsed = super().parse_args(args, namespace)
        for name, value in vars(parsed).items():
            if type(value) is str:
                check_path(value, name)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


class Text(str):
    """The text of an option that is one to read, and no path: of whole characters."""

    def __new__(cls, text):
        return super().__new__(cls, _checked(lambda: check_whole(text, "the option")))


def option_of(key: str) -> Callable:
    """Return a function of the text of an option that replaces one of a run's config.

    Args:
        key: "section.key" of the config, whose limits hold.
    """

    def read(text):
        config = RunConfig()
        set_option(config, key, parse_yaml(text, "the option"), "the option")
        section, name = key.split(".")
        return getattr(getattr(config, section), name)

    return lambda text: _checked(lambda: read(text))


def number(low: int, high: int) -> Callable:
    """Return a function of the text of an option that is an int from `low` to `high`."""

    def read(text):
        value = parse_yaml(text, "the option")
        if type(value) is not int or not low <= value <= high:
            raise InputError(f"expected an integer from {low} to {high}, got {text!r}")
        return value

    return lambda text: _checked(lambda: read(text))


def _checked(read):
    try:
        return read()
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_train(commands) -> None:
    """Add the command to argparse's subparsers."""
    train = commands.add_parser("train", help="train what a config says")
    train.add_argument("--config", required=True, help="a YAML file")
    train.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="replace values of the config, such as training.epochs=3",
    )  # fmt: skip
    train.add_argument("--run", help="the run folder; runs/NAME-OF-THE-CONFIG by default")
    train.add_argument(
        "--dry-run", action="store_true", help="read everything, and print what would be trained"
    )
    again = train.add_mutually_exclusive_group()
    again.add_argument("--overwrite", action="store_true", help="replace a run that is there")
    again.add_argument(
        "--resume", action="store_true", help="go on from the run's newest checkpoint, if any"
    )
