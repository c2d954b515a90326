"""Descriptions of config keys, read from comments and docstrings."""

import inspect
import re

# Patterns of a field with a comment, and of an entry of a class' docstring.
_COMMENT = r"(?m)^    (\w+): .*?  # (.*)$"
_ARGUMENT = r"(?m)^        (\w+): (.*(?:\n {12}.*)*)"


def field_descriptions(owner: type) -> dict[str, str]:
    """Return the description of each field of a dataclass.

    It is the description of the pydantic field, or else the comment after the field, or its entry
    in the docstring, of the last class that has one.
    """
    descriptions = {}
    for kind in owner.__mro__[-2::-1]:
        try:
            source = inspect.getsource(kind)
        except OSError:  # The class has no source, because a function created it.
            continue
        matches = re.findall(_COMMENT, source) + re.findall(_ARGUMENT, source)
        descriptions |= {name: " ".join(text.split()) for name, text in matches}
    for name, field in getattr(owner, "__pydantic_fields__", {}).items():
        if field.description is not None:
            descriptions[name] = field.description
    return descriptions
