"""Every command prints its help, which ends with a working example."""

import argparse
import shlex

import pytest

from dtransformer.cli import main
from dtransformer.cli.options import make_parser


def parsers(parser, path=()):
    """Yield the path and the parser of the command line and of each of its commands."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, (*path, name))


COMMANDS = dict(parsers(make_parser()))


@pytest.mark.parametrize("path", [(), ("checkpoint",)])
def test_without_a_command_help_is_printed_and_the_exit_code_is_0(path, capsys):
    assert main([*path]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: {' '.join(('dtransformer', *path))} ")
    assert printed.err == ""
    with pytest.raises(SystemExit) as ended:
        main([*path, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == printed.out


def test_unknown_command_raises_an_error(capsys):
    assert main(["trian"]) == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "dtransformer")
def test_help_ends_with_an_example_of_the_command(path, capsys):
    with pytest.raises(SystemExit):
        main([*path, "--help"])
    *_, title, example = capsys.readouterr().out.rstrip().split("\n")
    assert title == "example:"
    words = shlex.split(example)
    assert tuple(words[1 : 1 + len(path)]) == path
    for sign in "<>":
        words = words[: words.index(sign)] if sign in words else words
    assert make_parser().parse_args(words[1:]).run_by


@pytest.mark.parametrize("name", ["prepare", "new", "schema", "models", "plan"])
def test_examples_without_input_files_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(COMMANDS[name,].epilog.split("\n")[-1])
    words = words[: words.index(">")] if ">" in words else words
    assert main(words[1:]) == 0
    assert capsys.readouterr().out
