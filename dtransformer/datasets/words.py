"""Text to words, by the library `tokenizers`: every step can be undone by the tokenizer's `decode`."""

import collections
import json
from collections.abc import Iterable, Iterator

import tokenizers

from dtransformer.inputs.text import whole_texts

SPACE = "▁"  # U+2581, a space in front of the word
ESCAPE = "▂"  # U+2582; in the text itself "▁" becomes "▂1" and "▂" becomes "▂2"
ESCAPED_SPACE, ESCAPED_ESCAPE = ESCAPE + "1", ESCAPE + "2"

_WHITE_SPACE = r"[ \t\x0b\f\r\n]+"
_WORD = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?[^\p{{L}}\p{{M}}{SPACE}]"
# How normalised text is divided into words, in the library's form.
WORDS = {"type": "Split", "pattern": {"Regex": _WORD}, "behavior": "Isolated", "invert": False}

_TOGETHER = 8192  # sentences of a call of the library


def normalizers(lower_case: bool) -> list[dict]:
    """Return the library's normalizers: NFC, with `SPACE` for runs of white space, and in front.

    Marks that stand in the text itself are escaped.
    """
    return [{"type": "Lowercase"}] * lower_case + [
        {"type": "NFC"},
        replaced("String", ESCAPE, ESCAPED_ESCAPE),
        replaced("String", SPACE, ESCAPED_SPACE),
        replaced("Regex", rf"\A{_WHITE_SPACE}|{_WHITE_SPACE}\z", ""),
        replaced("Regex", _WHITE_SPACE, SPACE),
        {"type": "Prepend", "prepend": SPACE},
    ]


def replaced(kind: str, pattern: str, content: str) -> dict:
    """Return a normalizer, or a decoder, that puts a text where a pattern is.

    Args:
        kind: `"String"` or `"Regex"`.
        pattern: what is looked for.
        content: what comes in its place.
    """
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def made(fields: dict) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library; what is not among its fields it has not."""
    others = ("truncation", "padding", "post_processor", "decoder")
    fields = {"version": "1.0", "added_tokens": [], **dict.fromkeys(others), **fields}
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


def encoded(tokenizer: tokenizers.Tokenizer, sentences: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each sentence."""
    texts = whole_texts(sentences)
    for start in range(0, len(texts), _TOGETHER):
        some = texts[start : start + _TOGETHER]
        for one in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield one.ids


def counted_words(sentences: Iterable[str], lower_case: bool) -> dict[str, int]:
    """Return {word: count}, the most frequent first, ties in the order of characters."""
    texts, total = whole_texts(sentences), collections.Counter()
    words = made(
        {
            "normalizer": {"type": "Sequence", "normalizers": normalizers(lower_case)},
            "pre_tokenizer": WORDS,
            "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
        }
    )
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=2**31, show_progress=False)
    words.train_from_iterator(texts, trainer)
    for ids in encoded(words, texts):
        total.update(ids)
    found = {words.id_to_token(number): count for number, count in total.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def unescape(text: str) -> str:
    """Return text with `SPACE` turned into spaces, and escaped marks into marks."""
    text = text.replace(SPACE, " ")
    return text.replace(ESCAPED_SPACE, SPACE).replace(ESCAPED_ESCAPE, ESCAPE)
