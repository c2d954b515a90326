"""Values of run options that are mappings, or lists of mappings."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pydantic
from pydantic import BeforeValidator

from dtransformer.errors import short_repr, suggest
from dtransformer.inputs.json_file import problem
from dtransformer.planner.models import make_checked


def make_dataclass(kind: type) -> Callable:
    """Return a function that converts a mapping to a dataclass; other values stay unchanged.

    Args:
        kind: The dataclass. The function raises a ValueError for unknown keys and wrong values.
    """
    fields = [field.name for field in dataclasses.fields(kind)]

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value:
            if name not in fields:
                raise ValueError(
                    f"unknown key `{name}`, got {short_repr(value[name])} ({suggest(name, fields)})"
                )
        try:
            return make_checked(kind, value)
        except pydantic.ValidationError as error:
            place, text = problem(error)
            raise ValueError(f"`{place}` {text}" if place else text) from None

    return make


def make_list(kind: type, name: str) -> BeforeValidator:
    """Return a validator that makes a tuple of dataclasses from one value or a list.

    Args:
        kind: The dataclass.
        name: Field that a string sets. It must not be empty.
    """
    make = make_dataclass(kind)

    def make_all(value: Any) -> Any:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        result = [make({name: item} if isinstance(item, str) else item) for item in items]
        if value and not all(isinstance(x, kind) and getattr(x, name) for x in result):
            raise ValueError(f"must be a {name}, a mapping with `{name}`, or a list of these")
        return tuple(result) if value else ()

    return BeforeValidator(make_all, json_schema_input_type=str | kind | list[str | kind] | None)
