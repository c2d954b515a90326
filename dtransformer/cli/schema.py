"""`dtransformer schema`: a JSON schema of run configs, for editors."""

import argparse
import json

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from dtransformer.runs.config import TRANSLATION, yaml_key
from dtransformer.runs.descriptions import field_descriptions
from dtransformer.runs.options import SECTIONS


class _Generator(GenerateJsonSchema):
    """Generator that names keys as in YAML, describes them and forbids unknown keys."""

    def dataclass_schema(self, schema):
        fields = super().dataclass_schema(schema)["properties"]
        descriptions = field_descriptions(schema["cls"])
        properties = {
            yaml_key(field): {**value, "description": descriptions[field]}
            for field, value in fields.items()
        }
        return {
            "type": ["object", "null"],  # A section without keys is null.
            "properties": properties,
            "additionalProperties": False,
        }

    def field_title_should_be_set(self, schema):
        return False


def run_schema() -> dict:
    """Return the JSON schema (draft 2020-12) of run configs.

    The sections and their keys depend on `task`. Combinations of values are not checked.
    """
    owners = {owner for sections in SECTIONS.values() for owner in sections.values()}
    inputs = [(owner, "validation", TypeAdapter(owner)) for owner in owners]
    references, schema = TypeAdapter.json_schemas(inputs, schema_generator=_Generator)
    rules = []
    for task, sections in SECTIONS.items():
        keys = {name: references[owner, "validation"] for name, owner in sections.items()}
        keys |= {"task": {}, "parallel": {"anyOf": [keys["parallel"], {"const": "auto"}]}}
        is_task = {
            "properties": {"task": {"const": task}},
            "required": [] if task == TRANSLATION else ["task"],
        }
        rules.append({"if": is_task, "then": {"properties": keys, "additionalProperties": False}})
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "type": "object",
        "properties": {"task": {"enum": [*SECTIONS], "default": TRANSLATION}},
        "allOf": rules,
        **schema,
    }


def print_schema(_: argparse.Namespace) -> None:
    """Print the JSON schema of run configs."""
    print(json.dumps(run_schema(), indent=1))
