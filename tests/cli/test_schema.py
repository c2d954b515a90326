"""`dtransformer schema` accepts the configs that training accepts, and rejects mistakes."""

import json
import pathlib
import re

import pytest

from dtransformer.cli import main
from dtransformer.cli.schema import run_schema
from dtransformer.errors import InputError
from dtransformer.inputs.yaml_file import parse_yaml, read_yaml, yaml_text
from dtransformer.runs.config import RunConfig, load_config, save_config
from dtransformer.runs.descriptions import field_descriptions
from dtransformer.runs.options import SECTIONS
from dtransformer.runs.preview import new_config

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# Configs of Kubernetes and of examples/long_context/train.py.
OTHER_FILES = ("launch/mpijob.yaml", "long_context/copies.yaml")
NAMES = [path.relative_to(EXAMPLES).as_posix() for path in sorted(EXAMPLES.rglob("*.yaml"))]
SCHEMA = run_schema()
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "pattern": lambda value, pattern: re.search(pattern, value) is not None,
}
ANNOTATIONS = {"$schema", "$defs", "default", "description"}


def is_type(value, name):
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def is_equal(value, other):
    return type(value) is type(other) and value == other


def is_valid(value, schema=SCHEMA):
    """Return whether a value matches a JSON schema, by the keywords that `run_schema` uses."""
    for keyword, argument in schema.items():
        if not matches(value, keyword, argument, schema):
            return False
    return True


def matches(value, keyword, argument, schema):
    fields = value if isinstance(value, dict) else {}
    items = value if isinstance(value, list) else []
    if keyword in ANNOTATIONS or keyword == "then":
        return True
    if keyword == "$ref":
        return is_valid(value, SCHEMA["$defs"][argument.removeprefix("#/$defs/")])
    if keyword == "type":
        names = [argument] if isinstance(argument, str) else argument
        return any(is_type(value, name) for name in names)
    if keyword == "const":
        return is_equal(value, argument)
    if keyword == "enum":
        return any(is_equal(value, choice) for choice in argument)
    if keyword == "anyOf":
        return any(is_valid(value, part) for part in argument)
    if keyword == "allOf":
        return all(is_valid(value, part) for part in argument)
    if keyword == "if":
        return not is_valid(value, argument) or is_valid(value, schema["then"])
    if keyword == "required":
        return fields.keys() >= set(argument)
    if keyword == "properties":
        return all(is_valid(fields[key], part) for key, part in argument.items() if key in fields)
    if keyword == "additionalProperties":
        unknown = fields.keys() - schema.get("properties", {}).keys()
        return all(argument is not False and is_valid(fields[key], argument) for key in unknown)
    if keyword == "propertyNames":
        return all(is_valid(key, argument) for key in fields)
    if keyword == "items":
        return all(is_valid(item, argument) for item in items)
    is_checked = is_type(value, "string" if keyword[3:] in ("Length", "tern") else "number")
    return not is_checked or BOUNDS[keyword](value, argument)


def test_command_prints_the_schema(capsys):
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMA
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_FILES])
def test_every_example_is_valid(name):
    assert is_valid(read_yaml(EXAMPLES / name))


@pytest.mark.parametrize("task", SECTIONS)
def test_new_and_saved_configs_are_valid(task, tmp_path):
    assert is_valid(parse_yaml(new_config(task), task))
    save_config(RunConfig(task), tmp_path / "config.yaml")
    assert is_valid(read_yaml(tmp_path / "config.yaml"))


GOOD = """
training: {epochs: 3, schedule: linear}
---
{task: causal_lm, parallel: auto}
---
{task: causal_lm, model: null, parallel: {pipeline_schedule: zb_v, recompute: {select: [norm]}}}
---
{task: chat, data: {train: [a.jsonl, {path: b.jsonl, weight: 2}]}, model: {adapters: {rank: 4}}}
---
{task: causal_lm, training: {groups: [{pattern: "*bias", weight_decay: 0}], jit_compile: true}}
---
{task: causal_lm, model: {moe_config: {expert_num: 4}}}
"""
BAD = """
{task: cat}
---
{modle: {hidden_size: 8}}
---
{parallel: manual}
---
{evaluation: {samples: []}}
---
{task: causal_lm, search: {beam_size: 2}}
---
{task: causal_lm, data: {source: a.txt}}
---
{task: causal_lm, training: {epoch: 3}}
---
{task: causal_lm, training: {epochs: "3"}}
---
{task: causal_lm, training: {epochs: 0}}
---
{task: causal_lm, training: {schedule: square}}
---
{task: causal_lm, training: {label_smoothing: 1}}
---
{task: causal_lm, training: {jit_compile: maybe}}
---
{task: causal_lm, training: {groups: [{patern: "*bias"}]}}
---
{task: causal_lm, model: {from_: gpt2}}
---
{task: causal_lm, model: {moe_config: {expert_num: 0}}}
---
{task: causal_lm, model: {adapters: {rank: x}}}
---
{task: causal_lm, parallel: {optimizer_shard: 4}}
---
{task: causal_lm, parallel: {pipeline_schedule: zb_x}}
---
{task: causal_lm, parallel: {recompute: {select: [attn]}}}
---
{task: causal_lm, parallel: {parallel_rules: {mlp: stage}}}
---
{task: chat, data: {train: [{path: a.jsonl, weight: 0}]}}
---
{task: chat, data: {date: tomorrow}}
---
{task: chat, data: {fields: {prompt: 1}}}
"""


def configs(text):
    return [part.strip() for part in text.split("---")]


@pytest.mark.parametrize("text", configs(GOOD))
def test_schema_accepts_what_training_accepts(text, tmp_path):
    content = parse_yaml(text, "text")
    (tmp_path / "config.yaml").write_text(yaml_text(content))
    load_config(tmp_path / "config.yaml")
    assert is_valid(content)


@pytest.mark.parametrize("text", configs(BAD))
def test_schema_rejects_what_training_rejects(text, tmp_path):
    content = parse_yaml(text, "text")
    (tmp_path / "config.yaml").write_text(yaml_text(content))
    with pytest.raises(InputError):
        load_config(tmp_path / "config.yaml")
    assert not is_valid(content)


def test_every_key_has_a_description():
    owners = {owner for sections in SECTIONS.values() for owner in sections.values()}
    for owner in owners:
        properties = SCHEMA["$defs"][owner.__name__]["properties"]
        assert all(value["description"] for value in properties.values()), owner
        assert all(not text.startswith("#") for text in field_descriptions(owner).values())
