"""Reading JSON of limited size and depth, and checking its fields with pydantic."""

import difflib
import json
import re

import pydantic

from dtransformer.errors import InputError, short_repr
from dtransformer.inputs.files import MEBIBYTE, FilePath, read_bytes
from dtransformer.inputs.text import decode, describe_invalid_character

_MAX_NAME = 100
"""Maximum number of characters of a value that are compared with the names of allowed values."""

# Values are not converted silently: "1" is not an integer, and 1 is not a boolean.
STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)

# Types of pydantic's errors, and the required values.
_EXPECTED = {
    "string_type": "must be text (put it in quotes)",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    **dict.fromkeys(("int_type", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("is_instance_of", "dict_type", "model_type"), "must be keys and values"),
}


def problem(error: pydantic.ValidationError) -> tuple[str, str]:
    """Return the place of the first wrong value, and a description of the error.

    Args:
        error: Error raised by pydantic.

    Returns:
        A `(place, description)` tuple. `place` has names joined with dots, and is `""` for the value
        itself. `description` is a text such as "must be at least 1, got 0".
    """
    first, *others = error.errors(include_url=False)
    place = ".".join(short_repr(part).strip("'") for part in first["loc"])
    if first["type"] == "missing":
        return place, "is missing"
    if first["type"] == "value_error":
        expected = str(first["ctx"]["error"])
        if ", got " in expected:  # It describes a nested value.
            return place, expected
    else:
        # A value of a union has an error for each type.
        types = [detail for detail in others if detail["loc"][:1] == first["loc"][:1]]
        texts = [_expected(detail) for detail in (first, *types)]
        expected = " or ".join([texts[0], *(text.removeprefix("must be ") for text in texts[1:])])
    names = re.findall("'([^']+)'", expected)
    close = difflib.get_close_matches(str(first["input"])[:_MAX_NAME], names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return place, f"{expected}, got {short_repr(first['input'])}{hint}"


def _expected(error):
    message = error["msg"].removeprefix("Input ").replace("should ", "must ")
    text = _EXPECTED.get(error["type"], message[:1].lower() + message[1:])
    limits = error.get("ctx", {})
    return text.format(**{name: _as_integer(limit) for name, limit in limits.items()})


def _as_integer(limit):
    is_integer = isinstance(limit, float) and limit.is_integer()
    return int(limit) if is_integer else limit


MAX_BYTES = 16 * MEBIBYTE
MAX_DEPTH = 100


def read_json(path: FilePath, limit: int = MAX_BYTES) -> object:
    """Return the content of a JSON file. See `parse_json` for `limit` and errors."""
    return parse_json(read_bytes(path, limit), path, limit)


def read_object(path: FilePath) -> dict:
    """Return the content of a JSON file that contains an object, a dict.

    Raises:
        InputError: If the file is missing, damaged or contains another type.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} must contain a JSON object, got {short_repr(content)}.")
    return content


def parse_json(
    data: bytes | str, name: FilePath, limit: int = MAX_BYTES, checks_values: bool = True
) -> object:
    """Return the content of a JSON text.

    Args:
        data: Text, or its bytes in UTF-8.
        name: Origin of the text, for error messages.
        limit: Maximum number of bytes or characters. Defaults to 16 MiB.
        checks_values: Whether to apply `check_json` to the content. If false, callers check the
            values that they use. Defaults to `True`.

    Raises:
        InputError: If the text is too large, too deep or not valid JSON, or repeats a key, or if
            `check_json` fails.

    Example:

    >>> parse_json(b'{"step": 3}', "text")
    {'step': 3}
    """
    if len(data) > limit:
        raise InputError(
            f"{name} has more than {limit:,} bytes of JSON. Write records as JSON lines."
        )
    text = decode(data, name) if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_object)
        _check_depth(value)
    except RecursionError:
        raise InputError(f"{name} is damaged: its brackets are nested too deeply.") from None
    except ValueError as error:
        raise InputError(f"{name} is damaged or not valid JSON ({error}).") from None
    if checks_values:
        check_json(value, name)
    return value


def check_json(value: object, name: FilePath) -> None:
    """Check that JSON text can represent a value.

    Raises:
        InputError: If a number is not finite, or a text has half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: {describe_invalid_character(error)}") from None
    except ValueError as error:
        raise InputError(f"{name} is damaged or not valid JSON ({error}).") from None


def typed(value: object, kind: type[pydantic.BaseModel], name: FilePath) -> dict:
    """Check a JSON value against a pydantic model and return the value unchanged.

    Args:
        value: Content of a JSON file.
        kind: Class of the model.
        name: Origin of the value, for error messages.

    Returns:
        `value` itself, a dict.

    Raises:
        InputError: If a field is missing or wrong. The message names it.
    """
    try:
        kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise InputError(f"{name} is damaged: {' '.join(problem(error)).strip()}.") from None
    return value


def _object(pairs):
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _check_depth(value):
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for group in children for child in group if isinstance(child, (dict, list))]
    raise ValueError(f"more than {MAX_DEPTH} nested levels")
