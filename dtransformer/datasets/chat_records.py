"""Learnt parts of a conversation: found by rendering it, and by the characters that tokens have.

The text before an answer, as the template begins it, and the text through it are rendered; both have
to be beginnings of the whole, so that what is between them is the answer, its end mark included.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dtransformer.datasets.chat_template import ChatTemplate
from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.records import Record, Turns, messages_of, text_of
from dtransformer.errors import InputError, shown
from dtransformer.inputs.json_file import parse_json

Span = tuple[int, int]
_MARKS = "train", "weight"  # of messages, which templates do not see


class Rendered(NamedTuple):
    """A text, and where it is learnt.

    Args:
        text: the text.
        spans: list of (start, end), the characters that are learnt.
        is_plain: whether the tokenizer's start and end tokens come to it, as no template has them.
    """

    text: str
    spans: list[Span]
    is_plain: bool


def rendered(record: Record, template: ChatTemplate | None, train_on: str, place: str) -> Rendered:
    """Return the text of a record, and what of it is learnt.

    Args:
        record: of messages, a prompt and a completion, or text; see `records`.
        template: the chat template, for messages.
        train_on: `"assistant"`, `"last_assistant"` or `"all"`.
        place: where the record is, for messages.

    Raises:
        InputError: the record is of no kind that is known, or has nothing to learn; says where.
    """
    if "messages" in record:
        turns = messages_of(record["messages"], place)
        return conversation(turns, template, train_on, place, tools_of(record, place))
    if isinstance(record.get("prompt"), list):
        prompt = messages_of(record["prompt"], f"{place}, prompt")
        prompt = [{**message, "train": False} for message in prompt]
        turns = [*prompt, *messages_of(record.get("completion"), f"{place}, completion")]
        return conversation(turns, template, train_on, place, tools_of(record, place))
    if "completion" in record:
        prompt, completion = (text_of(record, key, place) for key in ("prompt", "completion"))
        if not completion:
            raise InputError(f"{place}: completion is empty, so that there is nothing to learn")
        text = prompt + completion
        return Rendered(text, [(0 if train_on == "all" else len(prompt), len(text))], True)
    text = text_of(record, "text", place)
    if not text:
        raise InputError(f"{place}: text is empty, so that there is nothing to learn")
    return Rendered(text, [(0, len(text))], True)


def tools_of(record: Record, place: str) -> list:
    """Return what a record says that the model may call, for its template.

    Raises:
        InputError: it is no list of objects, nor the JSON of one; says where.
    """
    tools = record.get("tools") or []
    if isinstance(tools, str):
        tools = parse_json(tools, f"{place}, tools") or []
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise InputError(f"{place}: tools are {shown(tools)}, expected a list of objects")
    return tools


def conversation(
    messages: Turns, template: ChatTemplate | None, train_on: str, place: str, tools: Sequence = ()
) -> Rendered:
    """Return the text of messages, and what of it is learnt; arguments as of `rendered`.

    `tools` are as of `ChatTemplate.render`.

    Example:

    >>> from dtransformer.datasets.chat_template import CHATML
    >>> turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
    >>> found = conversation(turns, ChatTemplate(CHATML), "assistant", "here")
    >>> [found.text[start:end] for start, end in found.spans]
    ['two<|im_end|>\\n']
    """
    if template is None:
        raise InputError(f"{place}: messages need a chat template: give data.template")
    seen = [{k: x for k, x in turn.items() if k not in _MARKS} for turn in messages]
    render = functools.partial(template.render, tools=tools or None)
    whole = render(seen)
    if train_on == "all":
        return Rendered(whole, [(0, len(whole))], False)
    answers = [number for number, turn in enumerate(seen) if turn["role"] == "assistant"]
    if not answers:
        raise InputError(
            f"{place}: has no message of an assistant, so that there is nothing to learn"
        )
    answers = answers[-1:] if train_on == "last_assistant" else answers
    spans = [
        _span(seen, number, whole, render, f"{place}, message {number + 1}")
        for number in answers
        if messages[number].get("train", True) and messages[number].get("weight", 1)
    ]
    if not spans:
        raise InputError(f"{place}: all answers have weight 0, so that there is nothing to learn")
    return Rendered(whole, spans, False)


def _span(messages, number, whole, render, place):
    """Return where the answer of a number is in the whole text."""
    before = render(messages[:number], add_generation_prompt=True)
    if not whole.startswith(before):
        # Some templates begin an answer that they ask for with more than one that is there.
        before = render(messages[:number])
        if not whole.startswith(before):
            raise InputError(
                f"{place}: the template renders what comes before it in another way than in the whole "
                "conversation, so that it is not known which part is the answer: give another template"
            )
    through = render(messages[: number + 1])
    if whole.startswith(through) and len(through) > len(before):
        return len(before), len(through)
    # What an answer at the end has, and one in the middle has not, as the thoughts of Qwen3's.
    content = (messages[number].get("content") or "").strip()
    if not content:
        raise InputError(
            f"{place}: the template renders this call of a tool in another way at the end, so that it "
            "is not known what is the answer: give train_on: last_assistant, or another template"
        )
    start = whole.find(content, len(before))
    ending = through[through.rfind(content) + len(content) :]
    end = start + len(content) + len(ending)
    if start < 0 or content not in through or whole[end - len(ending) : end] != ending:
        raise InputError(
            f"{place}: the text through it is no beginning of the whole conversation: the template "
            "renders it in another way at its end, so that it is not known what is the answer"
        )
    return len(before), end


def labels_of(ids: Sequence[int], places: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return the ids of tokens that have characters of a span, `IGNORED` elsewhere; int32 [n].

    White space that a tokenizer leaves out of a token's place was before its end.

    Example:

    >>> labels_of([7, 8, 9, 6], [(0, 2), (2, 4), (6, 6), (8, 8)], [(3, 6)]).tolist()
    [-100, 8, 9, -100]
    """
    found = np.array(ids, np.int32)
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    starts, is_learnt = np.minimum(starts, ends - 1), np.zeros(len(found), bool)
    for start, end in spans:
        is_learnt |= (starts < end) & (ends > start)
    return np.where(is_learnt, found, np.int32(IGNORED))
