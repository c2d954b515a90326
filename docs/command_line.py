"""Write docs/command-line.md from the parser, and from the fields of a run's config.

    python docs/command_line.py

A test compares the page with the code.
"""

import argparse
import dataclasses
import inspect
import pathlib
import re
import typing

import yaml

from dtransformer.cli.options import make_parser
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.runs import config, options, preview

PAGE = pathlib.Path(__file__).with_name("command-line.md")
HEAD = """# The command line

<!-- Written by docs/command_line.py from the code. -->

`dtransformer COMMAND --help` prints what this page has. `python -m dtransformer.cli` is the same
command. An error is one line, with exit code 2 where it can be mended, else 1;
`DTRANSFORMER_TRACEBACK=1` shows where it comes from. `dtransformer launch -np 2 -- COMMAND`
starts two ranks ([clusters](clusters.md)).
"""
YAML = """
## The keys of `train --config`

A YAML file with a `task` and these sections; `--set SECTION.KEY=VALUE …` replaces values. `parallel:
auto` leaves the layout to the [planner](planner.md#automatic-mode). Without a `task` it is
translation. [Training](training.md) shows files;
`dtransformer new TASK` writes one.
"""


def cell(text):
    """Return a text as a table's cell has it."""
    return " ".join(str(text).split()).replace("|", "\\|")


def command(name, parser):
    """Yield the lines of a command: its usage's options, each with what it does."""
    yield f"\n## `dtransformer {name}`\n\n{parser.description or ''}".rstrip() + "\n"
    example = parser.epilog.removeprefix("example:").strip()
    yield f"\n```bash\n{example}\n```"
    yield "\n| option | what it does |\n|---|---|"
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        names = ", ".join(action.option_strings) or action.metavar or action.dest.upper()
        value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "VALUE")
        if isinstance(action.metavar, tuple) or not action.option_strings or action.nargs == 0:
            value = ""
        told = action.help % {"default": action.default}
        told += " (needed)" * (action.required and bool(action.option_strings))
        yield f"| `{cell(f'{names} {value}'.strip())}` | {cell(told)} |"


def commands(parser, name=""):
    """Yield the lines of all commands, helps of them first."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help for one in action._choices_actions}
            for key, child in action.choices.items():
                child.description = f"{helps.get(key, '')[:1].upper()}{helps.get(key, '')[1:]}."
                full = f"{name} {key}".strip()
                if any(isinstance(x, argparse._SubParsersAction) for x in child._actions):
                    yield from commands(child, full)
                else:
                    yield from command(full, child)


def of_docstring(owner):
    """Return what the "Args:" of a class' docstring say, by names."""
    text = inspect.getdoc(owner).split("\nArgs:\n")[1].split("\n\n")[0]
    parts = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def choices(owner):
    """Return which texts a field may be, by names, where they are few."""
    hints = typing.get_type_hints(owner)
    return {
        name: " · ".join(f"`{x}`" for x in typing.get_args(hint))
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Literal
    }


def keys():
    """Yield the lines of all sections, with the tasks that have them."""
    tasks = {}
    for task, sections in options.SECTIONS.items():
        for name, owner in sections.items():
            tasks.setdefault((name, owner), []).append(task)
    shared = len(options.SECTIONS)
    for (name, owner), having in tasks.items():
        is_parallel = owner is TransformerOpParallelConfig
        told = of_docstring(owner) if is_parallel else preview.fields_told(owner)
        first = inspect.getdoc(owner).split("\n")[0]
        of = "" if len(having) == shared else f" of {', '.join(having)}"
        yield f"\n### `{name}`{of}\n\n{first}\n\n| key | default | what it is |\n|---|---|---|"
        default, one_of = owner(), choices(owner)
        for field in dataclasses.fields(owner):
            value = yaml.safe_dump(getattr(default, field.name)).split("\n")[0]
            text = told.get(field.name) or one_of[field.name]
            yield f"| `{config.key_of(field.name)}` | `{value}` | {cell(text)} |"


def page():
    """Return the page's text."""
    lines = [HEAD, *commands(make_parser()), YAML, *keys()]
    text = "\n".join(line.rstrip("\n") for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
