"""The `tokenizer.json` and `tokenizer_config.json` of a `SubwordTokenizer`."""

import json
from collections.abc import Sequence

import tokenizers

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[START]", "[END]")
INSIDE = "##"  # Prefix of pieces inside a word.
UNKNOWN_CHARACTER = "\ufffd"  # Replaces characters without a piece. It is not a piece.
SPACE = "▁"  # U+2581. Marks the space before a word.
ESCAPE = "▂"  # U+2582. In the text itself "▁" becomes "▂1", and "▂" becomes "▂2".
ESCAPED_SPACE = ESCAPE + "1"
ESCAPED_ESCAPE = ESCAPE + "2"

_UNKNOWN_TEXT = " ⁇ "
_WHITE_SPACE = r"[ \t\x0b\f\r\n]+"
_WORD = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?[^\p{{L}}\p{{M}}{SPACE}]"
_NAMES = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL_PIECES))


def tokenizer_fields(
    vocabulary: Sequence[str], characters: Sequence[str], lower_case: bool
) -> dict:
    """Return the content of a `tokenizer.json` that gives the same ids and texts.

    The only exceptions are texts that spell a special piece, such as "[PAD]": other libraries
    convert them to that piece. Text is normalized to NFC, `SPACE` replaces runs of white space and
    precedes the text, and marks in the text itself are escaped. A decoder undoes each step.

    Args:
        vocabulary: List of the pieces in the order of their ids.
        characters: List of the characters that are pieces. Others are unknown.
        lower_case: Boolean. Whether text is converted to lower case first.

    Returns:
        Dict that can be saved as JSON.
    """
    unknown = "[^" + "".join(rf"\x{{{ord(c):x}}}" for c in [*characters, SPACE]) + "]"
    normalizers = [{"type": "Lowercase"}] if lower_case else []
    normalizers += [
        {"type": "NFC"},
        _replace("String", ESCAPE, ESCAPED_ESCAPE),
        _replace("String", SPACE, ESCAPED_SPACE),
        _replace("Regex", rf"\A{_WHITE_SPACE}|{_WHITE_SPACE}\z", ""),
        _replace("Regex", _WHITE_SPACE, SPACE),
        {"type": "Prepend", "prepend": SPACE},
        _replace("Regex", unknown, UNKNOWN_CHARACTER),
    ]
    decoders = [
        _replace("Regex", rf"\A{INSIDE}", ""),
        _replace("String", _NAMES["unk_token"], _UNKNOWN_TEXT),
        {"type": "Fuse"},
        _replace("String", SPACE, " "),
        _replace("String", ESCAPED_SPACE, SPACE),
        _replace("String", ESCAPED_ESCAPE, ESCAPE),
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": piece, **special, "special": True}
            for token_id, piece in enumerate(SPECIAL_PIECES)
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
            "vocab": {piece: token_id for token_id, piece in enumerate(vocabulary)},
        },
    }


def config_fields() -> dict:
    """Return the content of `tokenizer_config.json`: tokenizer class and special tokens."""
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return kind | _NAMES


def build_tokenizer(fields: dict) -> tokenizers.Tokenizer:
    """Build a tokenizer of `tokenizers` that treats special pieces in texts as plain text."""
    return tokenizers.Tokenizer.from_str(json.dumps({**fields, "added_tokens": []}))


def _replace(kind, pattern, content):
    """Return a normalizer or decoder that replaces a pattern by `content`."""
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}
