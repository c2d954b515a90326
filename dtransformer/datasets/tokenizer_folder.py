"""Tokenizers from folders, published ones and our own."""

import os
import pathlib

import tokenizers

from dtransformer.datasets.published_tokenizer import PublishedTokenizer
from dtransformer.datasets.sentencepiece_tokenizer import SentencePieceTokenizer
from dtransformer.datasets.special_tokens import special_tokens
from dtransformer.datasets.tokenizer import FILE, SubwordTokenizer
from dtransformer.errors import InputError, one_line
from dtransformer.inputs.files import MEBIBYTE, check_path, read_bytes
from dtransformer.inputs.json_file import parse_json
from dtransformer.inputs.text import decode

BYTE_LEVEL = {"trained_by": "dtransformer.train_byte_level"}  # In `tokenizer_config.json`.
_MAX_BYTES = 128 * MEBIBYTE
_MAX_IDS = 2**31 - 1  # so that their number is an int32, too
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.model")


def load_tokenizer(folder: str | os.PathLike) -> PublishedTokenizer | SubwordTokenizer:
    """Return the tokenizer of a folder.

    It has a `tokenizer.json` of the library `tokenizers`, the files of a `SubwordTokenizer`, or a
    `tokenizer.model`, `spiece.model` or `sentencepiece.model` of SentencePiece. Files beside it
    say which ids are special: `tokenizer_config.json`, `special_tokens_map.json` and
    `generation_config.json`.

    Args:
        folder: its path.

    Raises:
        InputError: the folder or its file is missing, or damaged.

    Example:

    >>> SubwordTokenizer.train(["one two"], vocab_size=22).save("words")
    >>> tokenizer = load_tokenizer("words")
    >>> tokenizer.decode(tokenizer.encode(["two one"]))
    ['two one']
    """
    folder = check_path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder: give a published model's")
    if SubwordTokenizer.is_in(folder):
        return SubwordTokenizer.load(folder)
    if (folder / FILE).exists():
        return JsonTokenizer(folder / FILE)
    for path in (folder / name for name in _MODELS):
        if path.exists():
            return SentencePieceTokenizer(path, read_bytes(path, _MAX_BYTES))
    raise InputError(
        f"{folder}: expected {FILE} or {', '.join(_MODELS)}: a tokenizer in other files, such as "
        "vocab.json and merges.txt, is not read: save it again with its tokenizer.json"
    )


class JsonTokenizer(PublishedTokenizer):
    """A tokenizer of the library `tokenizers`: byte-pair encoding, WordPiece, Unigram, and others.

    Args:
        path: the file, whose folder may have files that name special tokens.

    Raises:
        InputError: it is no such file, or the files beside it do not fit.
    """

    def __init__(self, path: pathlib.Path):
        data = read_bytes(path, _MAX_BYTES)
        parse_json(data, path, _MAX_BYTES)
        try:
            self._library = tokenizers.Tokenizer.from_str(decode(data, path))
        except Exception as error:  # the library raises no other kind
            raise InputError(
                f"{path}: is no tokenizer of the library `tokenizers` ({one_line(error, 160)})"
            ) from None
        self._library.no_padding()
        self._library.no_truncation()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > _MAX_IDS:
            raise InputError(f"{path}: an id is {size - 1:,}, expected at most {_MAX_IDS - 1:,}")
        super().__init__(path, size, *special_tokens(path.parent, vocabulary.get, {}))

    def _rows(self, texts):
        # Tokenizers that this library trains must give back any text, also one with "<|end|>".
        self._library.encode_special_tokens = BYTE_LEVEL.items() <= self._config.items()
        rows = super()._rows(texts)
        self._library.encode_special_tokens = False
        return rows

    def _prompt_rows(self, texts):
        return super()._rows(texts)

    def _texts(self, rows):
        return self._library.decode_batch(rows, skip_special_tokens=True)
