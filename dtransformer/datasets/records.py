"""Records: what files hold that examples are made of, in the forms that are in use.

A record is a dict. `text` alone is a text; `messages` a conversation; `prompt` and `completion` a text
and how it goes on, or conversations; `chosen` and `rejected` two answers, with a `prompt` or without.
ShareGPT's `conversations` and Alpaca's `instruction`, `input`, `output` become messages.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtransformer.datasets.documents import objects, placed_values, read_documents
from dtransformer.datasets.text import read_pairs
from dtransformer.datasets.tool_calls import parsed_calls
from dtransformer.errors import InputError, shown
from dtransformer.inputs.files import FilePath
from dtransformer.inputs.json_file import check_json
from dtransformer.inputs.text import check_whole

Record = dict[str, Any]
Turns = list[dict[str, Any]]
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_SHAREGPT |= {"chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".xlsx")
_SIDES = "chosen", "rejected"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_records(
    path: FilePath, fields: Mapping[str, str] | None = None, target: FilePath | None = None
) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file, each with its place, for messages.

    Args:
        path: JSON lines or a list (`.jsonl`, `.ndjson`, `.json`), Parquet or Arrow, which need
            pyarrow; else text, of which each document between blank lines is a record. Text and JSON
            may be packed, `.gz`.
        fields: dict of our names of fields and the file's, where they differ.
        target: a file of lines that those of `path` become: records of `prompt` and `completion`.

    Raises:
        InputError: a file is missing or damaged, or a record is no object or lacks a field.

    Example:

    >>> import pathlib
    >>> _ = pathlib.Path("a.jsonl").write_text('{"question": "2?", "answer": "two"}')
    >>> names = {"prompt": "question", "completion": "answer"}
    >>> list(read_records("a.jsonl", names))
    [('a.jsonl, line 1', {'prompt': '2?', 'completion': 'two'})]
    """
    name, fields = str(path).lower(), dict(fields or {})
    if target is not None:
        pairs = zip(*read_pairs(path, target))
        found = (
            (f"{path}, line {number}", {"prompt": source, "completion": text})
            for number, (source, text) in enumerate(pairs, start=1)
        )
    elif (values := placed_values(path)) is not None:
        found = values
    elif name.endswith(_TABLES):
        raise InputError(f"{path}: tables of text are not read: give JSON lines or Parquet")
    else:
        texts = enumerate(read_documents([path]), start=1)
        found = ((f"{path}, document {number}", {"text": text}) for number, text in texts)
    yield from named_records(objects(found, fields.values()), fields)


def named_records(values: Iterable, fields: Mapping) -> Iterator[tuple[str, Record]]:
    """Yield records with this library's names of fields, each after its place.

    Args:
        values: Objects of a file, each after its place.
        fields: Dict of this library's names and the names in the file. Missing fields are left out.
    """
    named = {*fields, *fields.values()}
    for place, value in values:
        rest = {key: x for key, x in value.items() if key not in named and x is not None}
        own = {own: value[key] for own, key in fields.items() if key in value}
        yield place, _own_form({**rest, **own}, place)


_BESIDE_MESSAGES = "conversations", "instruction", "input", "output", "history", "system"


def _own_form(record, place):
    """Return a record whose conversation, of ShareGPT's or Alpaca's form, is in messages."""
    messages = record.get("messages")
    if messages is None and isinstance(record.get("conversations"), list):
        messages = [_of_sharegpt(turn, place) for turn in record["conversations"]]
    elif messages is None and "instruction" in record and "output" in record:
        messages = _of_alpaca(record, place)
    if not isinstance(messages, list):
        return record
    if record.get("system"):
        if any(isinstance(one, dict) and one.get("role") == "system" for one in messages[:1]):
            raise InputError(f"{place}: has system, and a turn of the system: leave one out")
        messages = [{"role": "system", "content": text_of(record, "system", place)}, *messages]
    rest = {key: x for key, x in record.items() if key not in _BESIDE_MESSAGES}
    return {**rest, "messages": messages}


def _of_alpaca(record, place):
    """Return the turns of a record, after its `history` of pairs of what was asked and answered."""
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(x, list) and len(x) == 2 for x in pairs):
        raise InputError(f"{place}: history is {shown(pairs)}, expected pairs of texts")
    parts = [text_of(record, key, place) for key in ("instruction", "input") if record.get(key)]
    texts = [*itertools.chain(*pairs), "\n".join(parts), text_of(record, "output", place)]
    return [
        {"role": r, "content": x} for r, x in zip(itertools.cycle(("user", "assistant")), texts)
    ]


def _of_sharegpt(turn, place):
    if not isinstance(turn, dict) or str(turn.get("from")) not in _SHAREGPT:
        raise InputError(
            f"{place}: a turn of conversations is {shown(turn)}, expected from and value, from one of "
            f"{', '.join(_SHAREGPT)}"
        )
    others = {k: x for k, x in turn.items() if k not in ("from", "value")}
    return {"role": _SHAREGPT[turn["from"]], "content": turn.get("value"), **others}


def text_of(record: Mapping, key: str, place: str) -> str:
    """Return a text of a record, checked.

    Raises:
        InputError: it is missing, or no text; says where.
    """
    value = record.get(key)
    if not isinstance(value, str):
        keys = shown(", ".join(record), 100)
        told = (
            f"is {shown(value)}, expected a text" if key in record else f"is missing; it has {keys}"
        )
        raise InputError(f"{place}: {key} {told}: give it, or name it in data.fields")
    check_whole(value, f"{place}, {key}")
    return value


def number_of(record: Mapping, key: str, place: str) -> float:
    """Return a finite number of a record.

    Raises:
        InputError: If it is missing, not finite or no number; names the place.
    """
    value = record.get(key)
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise InputError(f"{place}: {key} is {shown(value)}, expected a number")
    return float(value)


def messages_of(value: Any, place: str) -> Turns:
    """Return checked messages: dicts of a `role` and `content`.

    Keys without a value are left out. Arguments of tool calls that are JSON text, as in OpenAI's
    format, are parsed.

    Raises:
        InputError: If they are no messages; names the place.
    """
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{place}: messages are {shown(value)}, expected a list of role and content"
        )
    return [
        _checked_message(message, f"{place}, message {index}")
        for index, message in enumerate(value, start=1)
    ]


def _checked_message(message, place):
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InputError(
            f"{place} is {shown(message)}, expected role and content, role one of {', '.join(ROLES)}"
        )
    message = {key: x for key, x in message.items() if x is not None}
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(f"{place}: content is {shown(content)}, expected a text")
    if message.get("train", True) not in (True, False):
        raise InputError(f"{place}: train is {shown(message['train'])}, expected true or false")
    if message.get("weight", 1) not in (0, 1):
        raise InputError(
            f"{place}: weight is {shown(message['weight'])}, expected 1, or 0 to not learn it"
        )
    if calls := message.get("tool_calls"):
        message["tool_calls"] = parsed_calls(calls, f"{place}, tool_calls")
    check_json(message, place)
    return message


def preferred(record: Record, place: str) -> tuple[Turns | str, Turns | str, Turns | str]:
    """Return the prompt, the chosen and the rejected answer of a record, texts or messages.

    Where there is no prompt, it is the messages that both begin with.

    Raises:
        InputError: one is missing or of another kind; says where.
    """
    sides = [record.get(key) for key in _SIDES]
    if all(isinstance(side, str) for side in sides):
        prompt, sides = record.get("prompt"), [text_of(record, x, place) for x in _SIDES]
        if isinstance(prompt, list):
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in sides)
            return messages_of(prompt, place), chosen, rejected
        return text_of(record, "prompt", place), *sides
    chosen, rejected = (messages_of(side, f"{place}, {key}") for side, key in zip(sides, _SIDES))
    if "prompt" in record:
        prompt = record["prompt"]
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = messages_of(prompt, f"{place}, prompt")
        same = len(prompt)
        if chosen[:same] != prompt or rejected[:same] != prompt:
            if {chosen[0]["role"], rejected[0]["role"]} & {"system", "user"}:
                raise InputError(
                    f"{place}: chosen does not begin with the prompt: leave prompt out"
                )
            return prompt, chosen, rejected
        if same == min(len(chosen), len(rejected)):
            raise InputError(f"{place}: chosen or rejected has nothing after the prompt")
        return prompt, chosen[same:], rejected[same:]
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    if not same:
        raise InputError(f"{place}: chosen and rejected have no messages in common: give a prompt")
    return chosen[:same], chosen[same:], rejected[same:]
