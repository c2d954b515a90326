"""A `SubwordTokenizer` in the form of the library `tokenizers`: what `tokenizer.json` says of it."""

from collections.abc import Sequence

from dtransformer.datasets.vocabulary import INSIDE, SPECIAL_PIECES, UNKNOWN_CHARACTER
from dtransformer.datasets.words import (
    ESCAPE,
    ESCAPED_ESCAPE,
    ESCAPED_SPACE,
    SPACE,
    WORDS,
    normalizers,
    replaced,
)

_NAMES = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL_PIECES))


def tokenizer_fields(vocabulary: Sequence[str], unknown: str, lower_case: bool) -> dict:
    """Return the content of a `tokenizer.json` that gives the same ids and texts.

    But for texts that spell a special piece, such as "[PAD]", which is one there.

    Args:
        vocabulary: the pieces in the order of their ids.
        unknown: a regular expression of characters that are no pieces.
        lower_case: whether text is lower-cased first.
    """
    decoders = [
        replaced("Regex", rf"\A{INSIDE}", ""),
        {"type": "Fuse"},
        replaced("String", SPACE, " "),
        replaced("String", ESCAPED_SPACE, SPACE),
        replaced("String", ESCAPED_ESCAPE, ESCAPE),
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
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *normalizers(lower_case),
                replaced("Regex", unknown, UNKNOWN_CHARACTER),
            ],
        },
        "pre_tokenizer": WORDS,
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
