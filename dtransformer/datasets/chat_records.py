"""Rendering of records to text, with the spans to train on.

To locate an answer, the conversation is rendered several times. The answer starts where the prompt
for it and the full conversation have their common prefix. It ends where the conversation up to and
including it and the full conversation have theirs, so its end mark is also trained.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dtransformer.datasets.chat_template import ChatTemplate
from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.records import Record, Turns, check_messages, get_text
from dtransformer.datasets.tool_calls import get_tools
from dtransformer.errors import InputError

Span = tuple[int, int]
_MARKS = "train", "weight"  # Keys of messages that templates do not receive.
_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")


class Rendered(NamedTuple):
    """A text and its trained spans.

    Args:
        text: The text.
        spans: List of `(start, end)` tuples, the characters to train on.
        is_plain: Boolean. Whether the tokenizer adds its start and end tokens. Chat templates
            already contain them.
    """

    text: str
    spans: list[Span]
    is_plain: bool


def render_record(
    record: Record, template: ChatTemplate | None, train_on: str, place: str
) -> Rendered:
    """Return the text of a record and the spans to train on.

    Args:
        record: Dict with messages, a prompt and a completion, or text; see `records`.
        template: Chat template for messages, or `None`.
        train_on: `"assistant"` for all answers, `"last_assistant"` for the last one, or `"all"` for
            the whole text. Completions are trained without their prompt unless it is `"all"`.
        place: Origin of the record, for error messages.

    Returns:
        A `Rendered`.

    Raises:
        InputError: If the record is of an unknown kind or has nothing to train on. The message
            names the place.
    """
    if "messages" in record:
        turns = check_messages(record["messages"], place)
        return conversation(turns, template, train_on, place, get_tools(record, place))
    if isinstance(record.get("prompt"), list):
        prompt = check_messages(record["prompt"], f"{place}, prompt")
        prompt = [{**message, "train": False} for message in prompt]
        turns = [*prompt, *check_messages(record.get("completion"), f"{place}, completion")]
        return conversation(turns, template, train_on, place, get_tools(record, place))
    if "completion" in record:
        prompt, completion = (get_text(record, key, place) for key in ("prompt", "completion"))
        if not completion:
            raise InputError(f"{place}: `completion` is empty. Add a text or remove the record.")
        text = prompt + completion
        return Rendered(text, [(0 if train_on == "all" else len(prompt), len(text))], True)
    text = get_text(record, "text", place)
    if not text:
        raise InputError(f"{place}: `text` is empty. Add a text or remove the record.")
    return Rendered(text, [(0, len(text))], True)


def conversation(
    messages: Turns, template: ChatTemplate | None, train_on: str, place: str, tools: Sequence = ()
) -> Rendered:
    """Return the text of messages and the spans to train on.

    Args:
        messages: List of checked messages; see `check_messages`. Answers with `train: false` or
            `weight: 0` are not trained unless `train_on` is `"all"`.
        template: Chat template. `None` raises an error.
        train_on: See `render_record`.
        place: Origin of the conversation, for error messages.
        tools: List of tools; see `ChatTemplate.render`.

    Returns:
        A `Rendered`.

    Raises:
        InputError: If there is no template or nothing to train on, or an answer cannot be located.

    Example:

    >>> from dtransformer.datasets.chat_template import CHATML
    >>> turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}]
    >>> result = conversation(turns, ChatTemplate(CHATML), "assistant", "here")
    >>> [result.text[start:end] for start, end in result.spans]
    ['two<|im_end|>\\n']
    """
    if template is None:
        raise InputError(f"{place}: A conversation requires a chat template. Set `data.template`.")
    template_messages = list(map(_without_marks, messages))
    render = functools.partial(template.render, tools=tools)
    full_text = render(template_messages)
    if train_on == "all":
        return Rendered(full_text, [(0, len(full_text))], False)
    answers = [index for index, turn in enumerate(template_messages) if turn["role"] == "assistant"]
    if not answers:
        raise InputError(
            f"{place} has no assistant message to train on. Add an answer or remove the record."
        )
    answers = answers[-1:] if train_on == "last_assistant" else answers
    spans = [
        _span(template_messages, index, full_text, render, f"{place}, message {index + 1}")
        for index in answers
        if messages[index].get("train", True) and messages[index].get("weight", 1)
    ]
    if not spans:
        raise InputError(
            f"{place}: `weight` or `train` excludes all answers from training. Remove the record."
        )
    return Rendered(full_text, spans, False)


def _without_marks(message):
    return {key: value for key, value in message.items() if key not in _MARKS}


def _span(messages, index, full_text, render, place):
    """Return the (start, end) of one answer in the rendered conversation."""
    history = render(messages[:index])
    prompt = render(messages[:index], add_generation_prompt=True)
    if not full_text.startswith(prompt) and not _is_insertion(history, full_text):
        raise InputError(
            f"{place}: The template renders the messages before this answer differently in the full "
            "conversation, so the answer cannot be located. Use another template."
        )
    start = _common_prefix(prompt, full_text)
    text_to_end = render(messages[: index + 1])
    end = _common_prefix(text_to_end, full_text)
    if end > start and _is_insertion(text_to_end, full_text):
        return start, end
    # The last answer has parts that earlier answers lack, such as the thoughts of Qwen3.
    content = (messages[index].get("content") or "").strip()
    if not content:
        raise InputError(
            f"{place}: The template renders this tool call differently at the end of a conversation, "
            "so it cannot be located. Set `train_on: last_assistant` or use another template."
        )
    content_start = full_text.find(content, start)
    ending = text_to_end[text_to_end.rfind(content) + len(content) :]
    end = content_start + len(content) + len(ending)
    if (
        content_start < 0
        or content not in text_to_end
        or full_text[end - len(ending) : end] != ending
    ):
        raise InputError(
            f"{place}: The template renders this answer differently at the end of a conversation, so "
            "it cannot be located. Set `train_on: last_assistant` or use another template."
        )
    return start, end


def _common_prefix(part, full_text):
    """Return the length of the common prefix. If the texts differ, it never ends inside a tag."""
    if full_text.startswith(part):
        return len(part)
    return len(_OPEN_TAG.sub("", part[: _num_common(part, full_text)]))


def _is_insertion(part, full_text):
    """Return whether `whole` is `part` with inserted text, as before a template's last tokens."""
    return _num_common(part, full_text) + _num_common(part[::-1], full_text[::-1]) >= len(part)


def _num_common(part, full_text):
    differ = (index for index, (x, y) in enumerate(zip(part, full_text)) if x != y)
    return next(differ, min(len(part), len(full_text)))


def label_spans(ids: Sequence[int], places: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return labels: the ids of tokens that overlap a span, `IGNORED` elsewhere.

    Some tokenizers place a token of white space as an empty range at its end. Such a token counts
    as its last character.

    Args:
        ids: List of n token ids.
        places: List of n `(start, end)` tuples, the characters of each token.
        spans: List of `(start, end)` tuples, the characters to train on.

    Returns:
        int32 [n].

    Example:

    >>> label_spans([7, 8, 9, 6], [(0, 2), (2, 4), (6, 6), (8, 8)], [(3, 6)]).tolist()
    [-100, 8, 9, -100]
    """
    token_ids = np.array(ids, np.int32)
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    starts = np.minimum(starts, ends - 1)
    is_learnt = np.zeros(len(token_ids), bool)
    for start, end in spans:
        is_learnt |= (starts < end) & (ends > start)
    return np.where(is_learnt, token_ids, np.int32(IGNORED))
