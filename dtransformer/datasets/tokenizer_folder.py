"""Loading published tokenizers and tokenizers of this library from folders."""

import os
import pathlib

import tokenizers

from dtransformer.datasets.published_tokenizer import PublishedTokenizer
from dtransformer.datasets.sentencepiece_tokenizer import SentencePieceTokenizer
from dtransformer.datasets.special_tokens import special_tokens
from dtransformer.datasets.tokenizer import FILE, SubwordTokenizer
from dtransformer.errors import InputError, to_one_line
from dtransformer.inputs.files import MEBIBYTE, check_path, read_bytes
from dtransformer.inputs.json_file import parse_json
from dtransformer.inputs.text import decode

BYTE_LEVEL = {"trained_by": "dtransformer.train_byte_level"}  # Marks the config.
_MAX_BYTES = 128 * MEBIBYTE
_MAX_IDS = 2**31 - 1  # The vocabulary size must also fit int32.
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.model")


def load_tokenizer(folder: str | os.PathLike) -> PublishedTokenizer | SubwordTokenizer:
    """Load the tokenizer of a folder.

    The folder contains the files of a `SubwordTokenizer`, a `tokenizer.json` of the library
    `tokenizers`, or a SentencePiece model (`tokenizer.model`, `spiece.model` or
    `sentencepiece.model`). The first of these that exists is loaded. The optional files
    `tokenizer_config.json`, `special_tokens_map.json` and `generation_config.json` name the special
    tokens.

    Args:
        folder: Path of the folder.

    Returns:
        A `SubwordTokenizer`, `JsonTokenizer` or `SentencePieceTokenizer`.

    Raises:
        InputError: If the folder or its tokenizer is missing or damaged.

    Example:

    >>> SubwordTokenizer.train(["one two"], vocab_size=22).save("words")
    >>> tokenizer = load_tokenizer("words")
    >>> tokenizer.decode(tokenizer.encode(["two one"]))
    ['two one']
    """
    folder = check_path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist. Give the folder of a published model.")
    if SubwordTokenizer.is_in(folder):
        return SubwordTokenizer.load(folder)
    if (folder / FILE).exists():
        return JsonTokenizer(folder / FILE)
    for path in (folder / name for name in _MODELS):
        if path.exists():
            return SentencePieceTokenizer(path, read_bytes(path, _MAX_BYTES))
    raise InputError(
        f"{folder}: Expected {FILE} or {', '.join(_MODELS)}. Other files, such as vocab.json and "
        f"merges.txt, are not supported. Save the tokenizer again as {FILE}."
    )


def are_equal(
    tokenizer: PublishedTokenizer | SubwordTokenizer, other: PublishedTokenizer | SubwordTokenizer
) -> bool:
    """Return whether two tokenizers have equal vocabulary sizes and encode a sample text equally."""
    texts = ["The quick brown Fox, 12 + 3: naïve façade."]
    first, second = (candidate.encode(texts).to_list() for candidate in (tokenizer, other))
    return tokenizer.vocab_size == other.vocab_size and first == second


class JsonTokenizer(PublishedTokenizer):
    """Tokenizer of the library `tokenizers`: byte-pair encoding, WordPiece, Unigram and others.

    Args:
        path: Path of its `tokenizer.json`. Files in the same folder may name special tokens.

    Raises:
        InputError: If the file is damaged, or the files in its folder do not fit.
    """

    def __init__(self, path: pathlib.Path):
        data = read_bytes(path, _MAX_BYTES)
        parse_json(data, path, _MAX_BYTES)
        try:
            self._library = tokenizers.Tokenizer.from_str(decode(data, path))
        except Exception as error:  # The library raises plain exceptions.
            raise InputError(
                f"{path} is not a valid file of the library `tokenizers` ({to_one_line(error, 160)}). "
                "Copy it again."
            ) from None
        self._library.no_padding()
        self._library.no_truncation()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > _MAX_IDS:
            raise InputError(f"{path}: Expected ids of at most {_MAX_IDS - 1:,}, got {size - 1:,}.")
        super().__init__(path, size, *special_tokens(path.parent, vocabulary.get, {}))

    def _rows(self, texts):
        # Tokenizers that this library trains must give back any text, also one with "<|end|>".
        self._library.encode_special_tokens = BYTE_LEVEL.items() <= self._config.items()
        rows = super()._rows(texts)
        self._library.encode_special_tokens = False
        return rows

    def _encode_prompt_rows(self, texts):
        return super()._rows(texts)

    def _texts(self, rows):
        return self._library.decode_batch(rows, skip_special_tokens=True)
