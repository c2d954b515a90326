"""Strict reading of YAML: the subset that configs need.

It supports mappings and lists. It refuses anchors and aliases, whose nesting can fill the memory,
merges, tags, repeated keys and several documents. Plain scalars follow YAML 1.2's core schema:
true, false, null and numbers. All others are text, such as yes, 1:30 and 2014-05-01.
"""

import re

import yaml

from dtransformer.errors import InputError, short_repr, to_one_line
from dtransformer.inputs.files import FilePath, read_bytes
from dtransformer.inputs.text import decode

MAX_BYTES = 2**20
MAX_DEPTH = 8
MAX_NODES = 100_000
_MAX_DIGITS = 18
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
_NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)


def read_yaml(path: FilePath) -> object:
    """Return the content of a YAML file, or `None` for an empty file. See `parse_yaml`.

    Raises:
        InputError: If the file cannot be read or is not supported YAML. The message names the line.
    """
    return parse_yaml(decode(read_bytes(path, MAX_BYTES), path), path)


def parse_yaml(text: str, name: FilePath) -> object:
    """Return the content of a YAML text: dicts with str keys, lists, str, int, float, bool, None.

    Args:
        text: The text.
        name: Origin of the text, for error messages.

    Raises:
        InputError: If the text is too large or not supported YAML. The message names the line.

    Example:

    >>> parse_yaml("training: {epochs: 3, learning_rate: 1e-3}", "text")
    {'training': {'epochs': 3, 'learning_rate': 0.001}}
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{name} has more than {MAX_BYTES:,} characters. Use a shorter file.")
    try:
        return _Builder(yaml.parse(text, Loader=_LOADER)).document()
    except (yaml.YAMLError, _Unsupported, UnicodeError) as error:
        reason = to_one_line(error, 160).replace('in "<unicode string>", ', "at ")
        raise InputError(f"{name}: cannot be parsed as YAML ({reason})") from None


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes texts which `parse_yaml` would read as numbers, such as 1e5."""


def _represent_text(dumper, text):
    style = '"' if _NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(content: object) -> str:
    """Return content as YAML text for `parse_yaml`. Tuples become lists.

    Example:

    >>> print(yaml_text({"labels": ["1e5", "yes"]}), end="")
    labels:
    - "1e5"
    - 'yes'
    """
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_setting(text: str, option: str, form: str) -> tuple[str, object]:
    """Split a text such as "section.key=value" into the key and the parsed value.

    Args:
        text: The text.
        option: Name of its command-line option, for error messages.
        form: Expected form, such as "section.key=value", for error messages.

    Returns:
        A `(key, value)` tuple. The value is parsed as YAML.

    Raises:
        InputError: If the text has no "=", or its value is not supported YAML.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{option} {short_repr(text)} must have the form {form}.")
    return key.strip(), parse_yaml(value, f"{option} {short_repr(key)}")


class _Unsupported(Exception):
    """Valid YAML that `parse_yaml` does not support."""


class _Builder:
    """Builds values from the parser's events and checks each event before reading the next."""

    def __init__(self, events):
        self._events = events
        self._num_nodes = 0

    def document(self):
        next(self._events)  # Start of the stream.
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), 0)
        next(self._events)  # End of the document.
        if not isinstance(next(self._events), yaml.StreamEndEvent):
            raise _Unsupported("several documents, expected one")
        return value

    def _value(self, event, depth):
        where = f"line {event.start_mark.line + 1}"
        self._num_nodes += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise _Unsupported(f"{where}: write out the value of the anchor or alias")
        if event.tag:
            raise _Unsupported(f"{where}: remove the tag {short_repr(event.tag)}")
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise _Unsupported(f"{where}: more than {MAX_DEPTH} levels or {MAX_NODES} values")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value, where) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        values = {}
        for key_event in self._until(yaml.MappingEndEvent):
            where = f"line {key_event.start_mark.line + 1}"
            key = self._value(key_event, depth + 1)
            if not isinstance(key, str) or key == "<<":
                raise _Unsupported(
                    f"{where}: the key {short_repr(key)} must be a text and not a merge"
                )
            if key in values:
                raise _Unsupported(f"{where}: the key {short_repr(key)} is repeated; remove one")
            values[key] = self._value(next(self._events), depth + 1)
        return values

    def _until(self, kind):
        while not isinstance(event := next(self._events), kind):
            yield event


def _scalar(text, where):
    """Return the value of a plain scalar."""
    if text.lower() in _WORDS and text in (text.lower(), text.capitalize(), text.upper()):
        return _WORDS[text.lower()]
    if _NOT_FINITE.fullmatch(text):
        raise _Unsupported(f"{where}: expected a finite number, got {text}")
    if _NUMBER.fullmatch(text):
        is_integer = _INTEGER.fullmatch(text)
        if is_integer and len(text) > _MAX_DIGITS:
            raise _Unsupported(
                f"{where}: expected at most {_MAX_DIGITS} digits, got {short_repr(text)}"
            )
        if is_integer:
            return int(text)
        if text.isdigit():  # Leading zeros: some readers take 010 as ten, others as eight.
            return text
        if abs(value := float(text)) == float("inf"):
            raise _Unsupported(f"{where}: expected a finite number, got {short_repr(text)}")
        return value
    return text
