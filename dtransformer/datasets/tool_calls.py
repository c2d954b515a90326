"""Tools and tool calls of records. JSON text in them, as in OpenAI's format, is parsed."""

from collections.abc import Mapping
from typing import Any

from dtransformer.errors import InputError, short_repr
from dtransformer.inputs.files import FilePath
from dtransformer.inputs.json_file import check_json, parse_json, read_json


class ParsedText(dict):
    """Dict that was parsed from JSON text and prints as this text.

    Templates that print arguments and templates that convert them to JSON both work.

    Args:
        text: JSON text of an object. Blank text is an empty object.
        place: Origin of the text, for error messages.

    Raises:
        InputError: If the text is not a JSON object.
    """

    def __init__(self, text: str, place: str):
        fields = parse_json(text, place) if text.strip() else {}
        if not isinstance(fields, dict):
            raise InputError(f"{place} must be the JSON text of an object, got {short_repr(text)}.")
        super().__init__(fields)
        self._text = text

    def __str__(self):
        return self._text


def get_tools(record: Mapping, place: str) -> list:
    """Return the list of tools of a record. A record without tools gives an empty list.

    Raises:
        InputError: If the tools are neither a list of objects nor the JSON text of one. The message
            names the place.
    """
    return _objects(record.get("tools"), f"{place}, tools")


def tools_in(path: FilePath | None) -> list:
    """Return the list of tools in a JSON file. `None` gives an empty list.

    Raises:
        InputError: If the file is missing, damaged or not a list of objects.
    """
    return [] if path is None else _objects(read_json(path), str(path))


def parsed_calls(calls: Any, place: str) -> list:
    """Return a list of tool calls with their arguments as dicts.

    Raises:
        InputError: If the calls are not a list of objects, or arguments are not valid JSON. The
            message names the place.
    """
    return [_parsed_call(call, place) for call in _objects(calls, place)]


def _parsed_call(call, place):
    if isinstance(call.get("function"), dict):
        call = {**call, "function": _parsed_call(call["function"], place)}
    if isinstance(arguments := call.get("arguments"), str):
        call = {**call, "arguments": ParsedText(arguments, f"{place}, arguments")}
    return call


def _objects(value, place):
    value = value or []
    if isinstance(value, str):
        value = parse_json(value, place) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{place} must be a list of objects, got {short_repr(value)}.")
    check_json(value, place)
    return value
