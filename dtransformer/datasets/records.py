"""Training examples in the common file formats: text, conversations, completions and preferences.

A record is a dict of one of these kinds:

- `text`: plain text.
- `messages`: a conversation.
- `prompt` and `completion`: a text and its continuation, or messages.
- `chosen` and `rejected`: two answers, with an optional `prompt`.
- `prompt`, `completion` and `label`: an answer that is desirable (true) or not (false).
- `query`, `positive` and optional negative texts, or `query`, `document` and `label`: texts to
  retrieve.

ShareGPT's `conversations` and Alpaca's `instruction`, `input` and `output` are converted to
`messages`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtransformer.datasets.documents import check_objects, iterate_values, read_documents
from dtransformer.datasets.text import read_pairs
from dtransformer.datasets.tool_calls import parsed_calls
from dtransformer.errors import InputError, short_repr
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
    """Yield the records of a file.

    Args:
        path: Path of a file with JSON lines or a JSON list (`.jsonl`, `.ndjson`, `.json`), or of a
            Parquet or Arrow file, which require pyarrow. Any other file is text. Each of its
            documents, separated by blank lines, becomes a record with `text`. Text and JSON files
            are decompressed if their name ends in `.gz`.
        fields: Dict of this library's field names and the names in the file, where they differ.
        target: Path of a text file. Line n of `path` and line n of `target` become `prompt` and
            `completion`. Defaults to `None`: records come from `path` only.

    Yields:
        `(place, record)` tuples. The place names the file and line, for error messages.

    Raises:
        InputError: If a file is missing or damaged, or a record is not an object or lacks a field.

    Example:

    >>> import pathlib
    >>> _ = pathlib.Path("a.jsonl").write_text('{"question": "2?", "answer": "two"}')
    >>> names = {"prompt": "question", "completion": "answer"}
    >>> list(read_records("a.jsonl", names))
    [('a.jsonl, line 1', {'prompt': '2?', 'completion': 'two'})]
    """
    name = str(path).lower()
    fields = dict(fields or {})
    if target is not None:
        pairs = zip(*read_pairs(path, target))
        placed = (
            (f"{path}, line {line_number}", {"prompt": source, "completion": text})
            for line_number, (source, text) in enumerate(pairs, start=1)
        )
    elif (values := iterate_values(path)) is not None:
        placed = values
    elif name.endswith(_TABLES):
        raise InputError(
            f"{path}: CSV, TSV and Excel tables are not supported. Convert the file to JSON lines or "
            "Parquet."
        )
    else:
        texts = enumerate(read_documents([path]), start=1)
        placed = ((f"{path}, document {index}", {"text": text}) for index, text in texts)
    yield from named_records(check_objects(placed, fields.values()), fields)


def named_records(values: Iterable, fields: Mapping) -> Iterator[tuple[str, Record]]:
    """Yield `(place, record)` tuples with fields renamed to this library's names.

    Conversations in ShareGPT's or Alpaca's format are converted to `messages`.

    Args:
        values: Iterable of `(place, value)` tuples; each value is a dict.
        fields: Dict of this library's names and the names in the file. Missing fields are left out.

    Raises:
        InputError: If a conversation is malformed. The message names the place.
    """
    named = {*fields, *fields.values()}
    for place, value in values:
        rest = {key: x for key, x in value.items() if key not in named and x is not None}
        renamed = {name: value[key] for name, key in fields.items() if key in value}
        yield place, _convert_conversation({**rest, **renamed}, place)


_REPLACED_FIELDS = "conversations", "instruction", "input", "output", "history", "system"


def _convert_conversation(record, place):
    """Convert a conversation in ShareGPT's or Alpaca's format to `messages`."""
    messages = record.get("messages")
    if messages is None and isinstance(record.get("conversations"), list):
        messages = [_from_sharegpt(turn, place) for turn in record["conversations"]]
    elif messages is None and "instruction" in record and "output" in record:
        messages = _from_alpaca(record, place)
    if not isinstance(messages, list):
        return record
    if record.get("system"):
        if any(
            isinstance(message, dict) and message.get("role") == "system"
            for message in messages[:1]
        ):
            raise InputError(f"{place} has `system` and also a system message. Remove one of them.")
        messages = [{"role": "system", "content": get_text(record, "system", place)}, *messages]
    rest = {key: x for key, x in record.items() if key not in _REPLACED_FIELDS}
    return {**rest, "messages": messages}


def _from_alpaca(record, place):
    """Return the messages of an Alpaca record. Its `history` has earlier question-answer pairs."""
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(x, list) and len(x) == 2 for x in pairs):
        raise InputError(
            f"{place}: `history` must be a list of pairs of texts, got {short_repr(pairs)}."
        )
    parts = [get_text(record, key, place) for key in ("instruction", "input") if record.get(key)]
    texts = [*itertools.chain(*pairs), "\n".join(parts), get_text(record, "output", place)]
    return [
        {"role": r, "content": x} for r, x in zip(itertools.cycle(("user", "assistant")), texts)
    ]


def _from_sharegpt(turn, place):
    if not isinstance(turn, dict) or str(turn.get("from")) not in _SHAREGPT:
        raise InputError(
            f"{place}: A turn of `conversations` must have `value` and `from`, one of "
            f"{', '.join(_SHAREGPT)}, got {short_repr(turn)}."
        )
    other_fields = {k: x for k, x in turn.items() if k not in ("from", "value")}
    return {"role": _SHAREGPT[turn["from"]], "content": turn.get("value"), **other_fields}


def get_text(record: Mapping, key: str, place: str) -> str:
    """Return the string `record[key]`.

    Raises:
        InputError: If it is missing, not a string or contains half of a surrogate pair. The message
            names the place.
    """
    value = record.get(key)
    if not isinstance(value, str):
        keys = short_repr(", ".join(record), 100)
        problem = (
            f"must be a text, got {short_repr(value)}"
            if key in record
            else f"is missing; the record has {keys}"
        )
        raise InputError(f"{place}: `{key}` {problem}. Add it or set its name in `data.fields`.")
    check_whole(value, f"{place}, {key}")
    return value


def get_negatives(record: Mapping, place: str) -> list[str]:
    """Return the negative texts of a record: `negative`, then the list `negatives`.

    Both fields are optional.

    Raises:
        InputError: If a value has another type. The message names the place.
    """
    listed = record.get("negatives") or []
    if not isinstance(listed, list):
        raise InputError(f"{place}: `negatives` must be a list of texts, got {short_repr(listed)}.")
    single = [] if record.get("negative") is None else [get_text(record, "negative", place)]
    return single + [get_text({"negatives": text}, "negatives", place) for text in listed]


def get_number(record: Mapping, key: str, place: str) -> float:
    """Return the number `record[key]` as a float.

    Raises:
        InputError: If it is missing, not a number or not finite. The message names the place.
    """
    value = record.get(key)
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise InputError(f"{place}: `{key}` must be a finite number, got {short_repr(value)}.")
    return float(value)


def check_messages(value: Any, place: str) -> Turns:
    """Check the messages of a conversation and return copies of them.

    Keys without a value are left out. Arguments of tool calls that are JSON text, as in OpenAI's
    format, are parsed.

    Args:
        value: Nonempty list of dicts with `role` and `content`. A message with `tool_calls` may
            lack `content`. `train` (boolean) and `weight` (0 or 1) are optional.
        place: Origin of the conversation, for error messages.

    Returns:
        List of dicts.

    Raises:
        InputError: If the value is not a list of messages. The message names the place.
    """
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{place}: Expected a list of messages with `role` and `content`, got {short_repr(value)}."
        )
    return [
        _checked_message(message, f"{place}, message {index}")
        for index, message in enumerate(value, start=1)
    ]


def _checked_message(message, place):
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InputError(
            f"{place} must have `content` and `role`, one of {', '.join(ROLES)}, got "
            f"{short_repr(message)}."
        )
    message = {key: x for key, x in message.items() if x is not None}
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(f"{place}: `content` must be a text, got {short_repr(content)}.")
    if message.get("train", True) not in (True, False):
        raise InputError(
            f"{place}: `train` must be true or false, got {short_repr(message['train'])}."
        )
    if message.get("weight", 1) not in (0, 1):
        raise InputError(
            f"{place}: `weight` must be 1, or 0 to exclude the message from training, got "
            f"{short_repr(message['weight'])}."
        )
    if calls := message.get("tool_calls"):
        message["tool_calls"] = parsed_calls(calls, f"{place}, tool_calls")
    check_json(message, place)
    return message


def get_preference(record: Record, place: str) -> tuple[Turns | str, Turns | str, Turns | str]:
    """Return the prompt, the chosen answer and the rejected answer of a record.

    Without a `prompt`, the prompt consists of the first messages that both answers share.

    Returns:
        A `(prompt, chosen, rejected)` tuple of strings, or of lists of messages. Answers do not
        repeat the prompt.

    Raises:
        InputError: If a field is missing or of another type, if the answers have no common
            beginning and no prompt, or if an answer is empty after the prompt. The message names
            the place.
    """
    sides = [record.get(key) for key in _SIDES]
    if all(isinstance(side, str) for side in sides):
        prompt = record.get("prompt")
        sides = [get_text(record, x, place) for x in _SIDES]
        if isinstance(prompt, list):
            chosen, rejected = (_as_turns(text, "assistant") for text in sides)
            return check_messages(prompt, place), chosen, rejected
        return get_text(record, "prompt", place), *sides
    chosen, rejected = (check_messages(side, f"{place}, {key}") for side, key in zip(sides, _SIDES))
    if "prompt" in record:
        prompt = check_messages(_as_turns(record["prompt"], "user"), f"{place}, prompt")
        common = len(prompt)
        if chosen[:common] != prompt or rejected[:common] != prompt:
            if {chosen[0]["role"], rejected[0]["role"]} & {"system", "user"}:
                raise InputError(
                    f"{place}: `chosen` or `rejected` does not begin with `prompt`. Remove `prompt`."
                )
            return prompt, chosen, rejected
        if common == min(len(chosen), len(rejected)):
            raise InputError(
                f"{place}: `chosen` or `rejected` ends with the prompt. Add an answer."
            )
        return prompt, chosen[common:], rejected[common:]
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise InputError(
            f"{place}: `chosen` and `rejected` begin with different messages. Add a `prompt`."
        )
    return chosen[:common], chosen[common:], rejected[common:]


def get_labeled_answer(record: Record, place: str) -> tuple[Turns | str, Turns | str, bool]:
    """Return the prompt, the answer and the label of a record for KTO.

    Returns:
        A `(prompt, answer, label)` tuple. Prompt and answer are strings, or lists of messages.

    Raises:
        InputError: If a field is missing or of another type. The message names the place.
    """
    label = record.get("label")
    if label not in (True, False):
        raise InputError(
            f"{place}: `label` must be true for a desirable and false for an undesirable answer, got "
            f"{short_repr(label)}."
        )
    if all(isinstance(record.get(key), str) for key in ("prompt", "completion")):
        return get_text(record, "prompt", place), get_text(record, "completion", place), bool(label)
    sides = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        sides.append(check_messages(_as_turns(record.get(key), role), f"{place}, {key}"))
    return *sides, bool(label)


def _as_turns(value, role):
    """Return a text as a conversation of one turn, and other values unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
