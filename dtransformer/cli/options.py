"""Parser of the command line, with checks of all values."""

import argparse
import pathlib
from collections.abc import Callable
from typing import NoReturn

from dtransformer.errors import InputError
from dtransformer.inputs.files import check_path
from dtransformer.inputs.text import check_whole
from dtransformer.inputs.yaml_file import parse_yaml
from dtransformer.tables import read_table
from dtransformer.version import __version__


class Parser(argparse.ArgumentParser):
    """Argument parser that raises an `InputError` and does not accept abbreviated options.

    By default, argparse expands a mistyped `--over` to `--overwrite`. All strings are checked as paths,
    except values of the type `Text`.
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
    """String value of an option that is not a path. It must be valid Unicode."""

    def __new__(cls, text):
        return super().__new__(cls, _checked(lambda: check_whole(text, "the option")))


def integer_type(low: int, high: int) -> Callable:
    """Return an argparse type for integers from `low` to `high`."""

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


# Fields in commands.yaml, with functions from their values to argparse types.
_KINDS = {
    "number": lambda bounds: integer_type(*bounds),
    "text": lambda _: Text,
    "type": {"float": float}.get,
}


def make_parser() -> Parser:
    """Return the parser of the commands in `commands.yaml`.

    Its results have `run_by`, except for `dtransformer` and `dtransformer checkpoint` without
    a command. Then `print_help` prints the list of commands.
    """
    parser = Parser(
        prog="dtransformer",
        description="Train Transformers on many devices, and use them.",
        **_with_example("dtransformer new chat > chat.yaml"),
    )
    parser.add_argument("--version", action="version", version=f"dtransformer {__version__}")
    table = read_table(pathlib.Path(__file__).with_name("commands.yaml"))
    _add_commands(parser, table, "command")
    return parser


def _with_example(command):
    """Return parser arguments that append an example to the help."""
    return {
        "epilog": f"example:\n  {command}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _add_commands(parser, table, name):
    parser.set_defaults(print_help=parser.print_help)
    commands = parser.add_subparsers(dest=name, metavar=name.upper())
    for command, fields in table.items():
        child = commands.add_parser(
            command,
            help=fields["help"],
            usage=fields.get("usage"),
            **_with_example(fields["example"]),
        )
        if "run_by" in fields:
            child.set_defaults(
                run_by=fields["run_by"], without_tensorflow="without_tensorflow" in fields
            )
        if "actions" in fields:
            _add_commands(child, fields["actions"], "action")
        else:
            _add_options(child, fields["options"], fields.get("needed"))


def _add_options(parser, options, needed):
    groups = {(None, None): parser}  # Keys are (title, name of the mutually exclusive group).
    for names, option in options.items():
        title = option.pop("group", None)
        either = option.pop("either", None)
        if (title, None) not in groups:
            groups[title, None] = parser.add_argument_group(title)
        if (title, either) not in groups:
            outer = groups[title, None]
            groups[title, either] = outer.add_mutually_exclusive_group(required=either == needed)
        if option.pop("flag", False):
            option["action"] = "store_true"
        for kind in _KINDS.keys() & option.keys():
            option["type"] = _KINDS[kind](option.pop(kind))
        groups[title, either].add_argument(*names.split(", "), **option)
