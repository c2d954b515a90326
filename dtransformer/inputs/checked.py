"""Typed fields: pydantic checks values from outside, and one line says what is wrong."""

import pydantic

from dtransformer.errors import shown

# Nothing is converted silently: "1" is no integer, 1 is no truth value.
STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)

_EXPECTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text (put it in quotes)",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "dict_type": "must be keys and values",
    "model_type": "must be keys and values",
    "is_instance_of": "must be keys and values",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
}


def problem(error: pydantic.ValidationError) -> tuple[str, str]:
    """Return where the first wrong value stands, and what is wrong with it.

    Args:
        error: what pydantic raised.

    Returns:
        Names joined with dots, "" for the value itself; and a text such as
        "must be at least 1, got 0".
    """
    first = error.errors(include_url=False)[0]
    place = ".".join(shown(part).strip("'") for part in first["loc"])
    if first["type"] == "missing":
        return place, "is missing"
    if first["type"] == "value_error":
        expected = str(first["ctx"]["error"])
    elif first["type"] in _EXPECTED:
        expected = _EXPECTED[first["type"]].format(**first.get("ctx", {}))
    else:
        expected = first["msg"][:1].lower() + first["msg"][1:]
    return place, f"{expected}, got {shown(first['input'])}"
