"""A `SubwordTokenizer` in the form of the library `tokenizers`: what `tokenizer.json` says of it."""

import json
from collections.abc import Sequence

import tokenizers

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[START]", "[END]")
INSIDE = "##"  # begins the pieces inside a word
UNKNOWN_CHARACTER = "\ufffd"  # stands for characters without a piece; has none itself
SPACE = "▁"  # U+2581, a space in front of the word
ESCAPE = "▂"  # U+2582; in the text itself "▁" becomes "▂1" and "▂" becomes "▂2"
ESCAPED_SPACE, ESCAPED_ESCAPE = ESCAPE + "1", ESCAPE + "2"

_UNKNOWN_TEXT = " ⁇ "
_WHITE_SPACE = r"[ \t\x0b\f\r\n]+"
_WORD = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?[^\p{{L}}\p{{M}}{SPACE}]"
_NAMES = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL_PIECES))


def tokenizer_fields(
    vocabulary: Sequence[str], characters: Sequence[str], lower_case: bool
) -> dict:
    """Return the content of a `tokenizer.json` that gives the same ids and texts.

    But for texts that spell a special piece, such as "[PAD]", which is one there. Text is normalised
    to NFC, with `SPACE` for runs of white space, and in front; marks that stand in the text itself
    are escaped. Each step is undone by a decoder.

    Args:
        vocabulary: the pieces in the order of their ids.
        characters: those that are pieces themselves.
        lower_case: whether text is lower-cased first.
    """
    unknown = "[^" + "".join(rf"\x{{{ord(c):x}}}" for c in [*characters, SPACE]) + "]"
    normalizers = [{"type": "Lowercase"}] * lower_case + [
        {"type": "NFC"},
        _replaced("String", ESCAPE, ESCAPED_ESCAPE),
        _replaced("String", SPACE, ESCAPED_SPACE),
        _replaced("Regex", rf"\A{_WHITE_SPACE}|{_WHITE_SPACE}\z", ""),
        _replaced("Regex", _WHITE_SPACE, SPACE),
        {"type": "Prepend", "prepend": SPACE},
        _replaced("Regex", unknown, UNKNOWN_CHARACTER),
    ]
    decoders = [
        _replaced("Regex", rf"\A{INSIDE}", ""),
        _replaced("String", _NAMES["unk_token"], _UNKNOWN_TEXT),
        {"type": "Fuse"},
        _replaced("String", SPACE, " "),
        _replaced("String", ESCAPED_SPACE, SPACE),
        _replaced("String", ESCAPED_ESCAPE, ESCAPE),
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": piece, **special, "special": True}
            for number, piece in enumerate(SPECIAL_PIECES)
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _WORD},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "WordPiece",
            "unk_token": _NAMES["unk_token"],
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": 10**6,
            "vocab": {piece: number for number, piece in enumerate(vocabulary)},
        },
    }


def config_fields() -> dict:
    """Return the content of the `tokenizer_config.json` beside it."""
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return kind | _NAMES


def made(fields: dict) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library, for which a special piece in a text is none."""
    return tokenizers.Tokenizer.from_str(json.dumps({**fields, "added_tokens": []}))


def _replaced(kind, pattern, content):
    """Return a normalizer, or a decoder, that puts a text where a pattern is."""
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}
