"""Write docs/command-line.md from the parser and from the fields of run configs.

    python docs/command_line.py

A test compares the page with the code.
"""

import argparse
import dataclasses
import inspect
import pathlib
import re

import yaml

from dtransformer.cli.options import make_parser
from dtransformer.cli.schema import run_schema
from dtransformer.parallel.config.config import MoEConfig, TransformerRecomputeConfig
from dtransformer.runs import config, network_options, options
from dtransformer.runs.descriptions import field_descriptions
from dtransformer.runs.unread import is_read

PAGE = pathlib.Path(__file__).with_name("command-line.md")
HEAD = """# Command line

<!-- Written by docs/command_line.py from the code. -->

This page lists all commands, their options and the [keys of YAML configs](#the-keys-of-train-config).
`dtransformer COMMAND --help` prints the options. `python -m dtransformer.cli` is the same command.

- To use two ranks, write `dtransformer launch -np 2 --` before a command ([clusters](clusters.md)).
- An error is one line. The exit code is 2 if you can correct the input, otherwise 1. Set
  `DTRANSFORMER_TRACEBACK=1` to see the traceback.
"""
YAML = """
## The keys of `train --config`

A config is a YAML file with a `task` and the sections below. `dtransformer new TASK` prints one, and
[training](training.md) shows examples. Without a `task` it is `translation`. `parallel: auto` lets the
[planner](planner.md#automatic-mode) choose the layout. `--set SECTION.KEY=VALUE …` replaces values.

### Completion in editors

```bash
dtransformer schema > config.schema.json
```

writes a JSON schema (draft 2020-12) of configs. With the YAML extension of VS Code, start a config with
the comment below. The editor then completes keys, shows descriptions and marks wrong keys and types.

```yaml
# yaml-language-server: $schema=config.schema.json
task: causal_lm
```

The path is relative to the config. The schema knows the sections of each task. To check combinations of
values, run `dtransformer train --config my.yaml --dry-run`.
"""
DEFINITIONS = run_schema()["$defs"]
# Parts of a docstring's entry that repeat other columns.
REPEATED = re.compile(
    r"^(Boolean or integer|Integer|Boolean|Float|String)\. | Defaults to `[^`]*`\.$"
)
NESTED = {
    "`data.train` and `data.dev`": options.Source,
    "`model.adapters`": network_options.AdapterOptions,
    "`training.guard`": options.GuardOptions,
    "`model.moe_config`": MoEConfig,
    "`training.groups`": options.GroupOptions,
    "`parallel.recompute`": TransformerRecomputeConfig,
}
TYPES = {"array": "list", "object": "mapping", "string": "text"}


def cell(text):
    """Return text as a table cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def command(name, parser):
    """Yield the lines of a command: description, example and table of options."""
    yield f"\n## `dtransformer {name}`\n\n{parser.description or ''}".rstrip() + "\n"
    example = parser.epilog.removeprefix("example:").strip()
    yield f"\n```bash\n{example}\n```"
    rows = [
        row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)
    ]
    if rows:
        yield "\n| option | description |\n|---|---|"
        yield from rows


def row(action):
    """Return the table row of an option."""
    names = ", ".join(action.option_strings) or action.metavar or action.dest.upper()
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "VALUE")
    if isinstance(action.metavar, tuple) or not action.option_strings or action.nargs == 0:
        value = ""
    text = action.help % {"default": action.default}
    text = text[:1].upper() + text[1:] if action.option_strings else text
    text += " (required)" * (action.required and bool(action.option_strings))
    return f"| `{cell(f'{names} {value}'.strip())}` | {cell(text)} |"


def commands(parser, name=""):
    """Yield the lines of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for key, child in action.choices.items():
                child.description = f"{helps.get(key, '')[:1].upper()}{helps.get(key, '')[1:]}."
                full = f"{name} {key}".strip()
                if any(isinstance(x, argparse._SubParsersAction) for x in child._actions):
                    yield from commands(child, full)
                else:
                    yield from command(full, child)


def type_of(schema):
    """Return the type of a key: choices, or a name such as "integer"."""
    if "enum" in schema:
        return " ".join(f"`{str(value).lower()}`" for value in schema["enum"])
    if "$ref" in schema:
        return "mapping"
    if "anyOf" in schema:
        types = [type_of(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(types))
    return TYPES.get(schema["type"], schema["type"])


def keys():
    """Yield the lines of all sections, with their tasks, and of the mappings inside of them."""
    tasks = {}
    for task, sections in options.SECTIONS.items():
        for name, owner in sections.items():
            tasks.setdefault((name, owner), []).append(task)
    titles = {}
    for (name, owner), names in tasks.items():
        missing = [task for task in options.SECTIONS if task not in names]
        of = f" of {names[0]}" + " and others" * (len(names) > 1) if missing else ""
        titles[owner] = f"`{name}`{of}"
        yield f"\n### {titles[owner]}\n"
        task_names = ", ".join(f"`{task}`" for task in (missing if len(missing) == 1 else names))
        task_names = f"all except {task_names}" if len(missing) == 1 else task_names
        yield f"\n{summary(owner)} Tasks: {task_names if missing else 'all'}."
        fields = dataclasses.fields(owner)
        base, added = owner.__base__, inspect.get_annotations(owner)
        if base in titles and added.keys().isdisjoint(x.name for x in dataclasses.fields(base)):
            fields = [field for field in fields if field.name in added]
            yield f"It has all keys of {titles[base]} and these:"
        yield from table(owner, fields, name, names)
    for name, owner in NESTED.items():
        yield f"\n### Fields of {name}\n\n{summary(owner)}"
        yield from table(owner, dataclasses.fields(owner))


def summary(owner):
    """Return the first line of a docstring, without references to other classes."""
    return inspect.getdoc(owner).split("\n")[0].split("; see")[0].removesuffix(".") + "."


def table(owner, fields, section="", tasks=()):
    """Yield the lines of a table of keys."""
    descriptions = field_descriptions(owner)
    properties = DEFINITIONS[owner.__name__]["properties"]
    yield "\n| key | type | default | description |\n|---|---|---|---|"
    for field in fields:
        key = config.yaml_key(field.name)
        readers = [task for task in tasks if is_read(task, f"{section}.{key}")]
        if tasks and not readers:
            continue
        value = yaml.safe_dump(getattr(owner(), field.name)).split("\n")[0]
        text = REPEATED.sub("", descriptions[field.name]).removesuffix(".")
        for word, yaml_word in (("None", "null"), ("True", "true"), ("False", "false")):
            text = text.replace(f"`{word}`", f"`{yaml_word}`")
        others = [task for task in tasks if task not in readers]
        if others:
            is_short = len(others) < len(readers)
            text += f" (not {', '.join(others)})" if is_short else f" (only {', '.join(readers)})"
        choices = properties[key].get("enum", ())
        has_choices = choices and all(str(choice).lower() in text for choice in choices)
        kind = "text" if has_choices else type_of(properties[key])
        yield f"| `{key}` | {kind} | `{cell(value)}` | {cell(text)} |"


def page():
    """Return the text of the page."""
    lines = [HEAD, *commands(make_parser()), YAML, *keys()]
    text = "\n".join(line.rstrip("\n") for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
