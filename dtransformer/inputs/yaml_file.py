"""A strict reading of YAML: the part of it that configs need, and nothing that grows or surprises.

Sections of keys and values, and lists. Not taken: anchors and aliases (ten lines of them make
gigabytes), merges, tags, repeated keys, several documents. Plain scalars are as in YAML 1.2's core
schema: true, false, null, numbers; all else is text, such as yes, 1:30 and 2014-05-01.
"""

import re

import yaml

from dtransformer.errors import InputError, one_line, shown
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
    """Return the content of a YAML file; None where it has none.

    Raises:
        InputError: it cannot be read, or is no YAML of the kind that is taken; says the line.
    """
    return parse_yaml(decode(read_bytes(path, MAX_BYTES), path), path)


def parse_yaml(text: str, name: FilePath) -> object:
    """Return the content of a YAML text: dicts with str keys, lists, str, int, float, bool, None.

    Args:
        text: the text.
        name: where it comes from, for messages.

    Raises:
        InputError: see `read_yaml`.

    Example:

    >>> parse_yaml("training: {epochs: 3, learning_rate: 1e-3}", "text")
    {'training': {'epochs': 3, 'learning_rate': 0.001}}
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{name}: expected YAML of at most {MAX_BYTES:,} characters")
    try:
        return _Builder(yaml.parse(text, Loader=_LOADER)).document()
    except (yaml.YAMLError, _Refused, UnicodeError) as error:
        reason = one_line(error, 160).replace('in "<unicode string>", ', "at ")
        raise InputError(f"{name}: cannot be parsed as YAML ({reason})") from None


class _Dumper(yaml.SafeDumper):
    """Quotes texts that this reading takes for something else, such as 1e5."""


def _quoted(dumper, text):
    style = '"' if _NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def yaml_text(content: object) -> str:
    """Return YAML that `parse_yaml` makes the same content of; tuples become lists.

    Example:

    >>> print(yaml_text({"labels": ["1e5", "yes"]}), end="")
    labels:
    - "1e5"
    - 'yes'
    """
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_setting(text: str, option: str, form: str) -> tuple[str, object]:
    """Return key and value of a text such as "section.key=value".

    Args:
        text: the text.
        option: the option that it is given by, for messages.
        form: what it should be like.

    Raises:
        InputError: it has no "=", or its value is no YAML.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{option} {shown(text)}: expected {form}")
    return key.strip(), parse_yaml(value, f"{option} {shown(key)}")


class _Refused(Exception):
    """What is YAML, and not taken."""


class _Builder:
    """Makes values of the parser's events, of which each is looked at before more is read."""

    def __init__(self, events):
        self._events, self._num_nodes = events, 0

    def document(self):
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), 0)
        next(self._events)  # the document's end
        if not isinstance(next(self._events), yaml.StreamEndEvent):
            raise _Refused("several documents: give one")
        return value

    def _value(self, event, depth):
        where = f"line {event.start_mark.line + 1}"
        self._num_nodes += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise _Refused(f"{where}: an anchor or alias: write the value out")
        if event.tag:
            raise _Refused(f"{where}: the tag {shown(event.tag)}: leave it out")
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise _Refused(f"{where}: more than {MAX_DEPTH} levels, or {MAX_NODES} values")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value, where) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        values = {}
        for key_event in self._until(yaml.MappingEndEvent):
            where = f"line {key_event.start_mark.line + 1}"
            key = self._value(key_event, depth + 1)
            if not isinstance(key, str) or key == "<<":
                raise _Refused(f"{where}: the key {shown(key)}: keys are texts, and none merges")
            if key in values:
                raise _Refused(f"{where}: the key {shown(key)} occurs twice: remove one")
            values[key] = self._value(next(self._events), depth + 1)
        return values

    def _until(self, kind):
        while not isinstance(event := next(self._events), kind):
            yield event


def _scalar(text, where):
    """Return what a plain scalar stands for."""
    if text.lower() in _WORDS and text in (text.lower(), text.capitalize(), text.upper()):
        return _WORDS[text.lower()]
    if _NOT_FINITE.fullmatch(text):
        raise _Refused(f"{where}: {text}: expected a finite number")
    if _NUMBER.fullmatch(text):
        is_integer = _INTEGER.fullmatch(text)
        if is_integer and len(text) > _MAX_DIGITS:
            raise _Refused(f"{where}: {shown(text)}: expected at most {_MAX_DIGITS} digits")
        if is_integer:
            return int(text)
        if text.isdigit():  # 010 is ten to some, eight to others
            return text
        if abs(value := float(text)) == float("inf"):
            raise _Refused(f"{where}: {shown(text)}: expected a finite number")
        return value
    return text
