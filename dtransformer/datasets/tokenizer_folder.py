"""Tokenizers from folders, published ones and our own."""

import os

from dtransformer.datasets.published_tokenizer import PublishedTokenizer
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.errors import InputError
from dtransformer.inputs.files import MEBIBYTE, read_bytes
from dtransformer.inputs.json_file import parse_json
from dtransformer.inputs.paths import check_path
from dtransformer.inputs.text import decode

_MAX_BYTES = 128 * MEBIBYTE
_JSON, _MODELS = "tokenizer.json", ("tokenizer.model", "spiece.model", "sentencepiece.model")
_OWN = "subword_tokenizer.json"


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
    if (folder / _OWN).exists():
        return SubwordTokenizer.load(folder)
    if (folder / _JSON).exists():
        return _of_json(folder / _JSON)
    for path in (folder / name for name in _MODELS):
        if path.exists():
            from dtransformer.datasets.sentencepiece_tokenizer import SentencePieceTokenizer

            return SentencePieceTokenizer(path, read_bytes(path, _MAX_BYTES))
    raise InputError(
        f"{folder}: expected {_JSON} or {', '.join(_MODELS)}: a tokenizer in other files, such as "
        "vocab.json and merges.txt, is not read: save it again with its tokenizer.json"
    )


def _of_json(path):
    data = read_bytes(path, _MAX_BYTES)
    content = parse_json(data, path, _MAX_BYTES)
    if isinstance(content, dict) and "format" in content:
        return SubwordTokenizer.load(path.parent)
    from dtransformer.datasets.json_tokenizer import JsonTokenizer

    return JsonTokenizer(path, decode(data, path))
