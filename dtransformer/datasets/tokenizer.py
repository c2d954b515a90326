"""A subword tokenizer whose text comes back exactly.

Text is divided in three steps, each of which can be undone:

1. Normalise: Unicode NFC; runs of white space become one space, none at the ends.
   A no-break space is a character like any other.
2. Words: every space becomes the mark `▁` in front of the next word. A word is a run of letters,
   or one character of any other kind, so that digits and punctuation stand alone. A mark that
   stands in the text itself is escaped.
3. Pieces of the vocabulary (WordPiece): the longest piece first, pieces inside a word begin
   with `##`.

So `L'été dure 30 s ?` becomes `▁L ' été ▁dure ▁3 0 ▁s ▁?`, and joining the pieces and
turning marks into spaces gives the text again. Every character of the training text is
a piece of its own, so only characters never seen there are unknown.

Reference: Wu et al., Google's Neural Machine Translation System, 2016, section 4.1;
Song et al., Fast WordPiece Tokenization, EMNLP 2021.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pydantic
import tensorflow as tf
import tokenizers

from dtransformer.datasets.chat_template import TakesTemplate
from dtransformer.datasets.published_form import config_fields, tokenizer_fields
from dtransformer.datasets.published_tokenizer import Encoding, encodings
from dtransformer.datasets.special_tokens import CONFIG
from dtransformer.datasets.text_files import write_text_atomically
from dtransformer.datasets.vocabulary import (
    END,
    PAD,
    START,
    UNK,
    characters_of,
    check_vocabulary,
    learn_vocabulary,
    text_of,
)
from dtransformer.datasets.words import SPACE, encoded, made, unescape
from dtransformer.errors import InputError, shown
from dtransformer.inputs.checked import STRICT
from dtransformer.inputs.files import MEBIBYTE, read_bytes
from dtransformer.inputs.json_file import read_json, typed
from dtransformer.inputs.paths import check_path
from dtransformer.inputs.text import decode_lines

_UNKNOWN_TEXT = " ⁇ "
_FORMAT, _VERSION = "dtransformer.SubwordTokenizer", 1
_CONFIG_FILE, _VOCABULARY_FILE = "subword_tokenizer.json", "vocab.txt"
_PUBLISHED_FILE = "tokenizer.json"  # for other libraries; of older folders the config
_MAX_CONFIG_BYTES, _MAX_VOCABULARY_BYTES = 2**16, 64 * MEBIBYTE


class _Config(pydantic.BaseModel):
    """What `subword_tokenizer.json` holds."""

    model_config = STRICT
    format: str
    version: int
    vocab_size: int
    lower_case: bool


class SubwordTokenizer(TakesTemplate):
    """Turns sentences into ids of subword pieces and back, without loss.

    `decode(encode(text))` gives the text again, up to Unicode NFC, runs of white space
    (one space remains) and characters that the training text lacked (`⁇`). Make one
    with `SubwordTokenizer.train` or `SubwordTokenizer.load`.

    Args:
        vocabulary: the pieces in the order of their ids: `[PAD]`, `[UNK]`, `[START]`,
            `[END]`, then the pieces of text.
        lower_case: whether text is lower-cased first; it comes back in lower case.

    Example:

    >>> tokenizer = SubwordTokenizer.train(["L'été dure.", "L'été part."], vocab_size=36)
    >>> ids = tokenizer.encode(["L'été part."])  # tf.RaggedTensor [1, (pieces)]
    >>> tokenizer.decode(ids)
    ["L'été part."]
    """

    pad_id, unk_id, start_id, end_id = PAD, UNK, START, END

    def __init__(self, vocabulary: Iterable[str], lower_case: bool = False):
        self._vocabulary = tuple(vocabulary)
        self._lower_case = bool(lower_case)
        check_vocabulary(self._vocabulary)
        texts = [text_of(piece) for piece in self._vocabulary]
        texts[PAD] = texts[START] = texts[END] = ""
        texts[UNK] = _UNKNOWN_TEXT
        self._texts = np.array(texts, dtype=object)

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        max_sentences: int | None = None,
        lower_case: bool = False,
        max_characters: int = 1000,
        at_most: bool = False,
    ) -> "SubwordTokenizer":
        """Learn a vocabulary of exactly `vocab_size` pieces from text.

        The result depends on the sentences only, not on chance.

        Args:
            sentences: sentences of all languages that share the vocabulary.
            vocab_size: number of pieces, the four special ones included.
            max_sentences: number of sentences to learn from, spread evenly over all; None for all.
            lower_case: whether text is lower-cased.
            max_characters: number of distinct characters, the most frequent ones, that become
                pieces (two each: at the beginning of a word and inside); others are
                unknown.
            at_most: whether a text that has fewer pieces gives those that it has.

        Raises:
            InputError: there is no text, or the vocabulary is smaller than its characters need,
                or larger than it can fill; the message has the size that it can.
        """
        sentences = list(sentences)
        if max_sentences is not None and len(sentences) > max_sentences:
            picked = np.linspace(0, len(sentences) - 1, max_sentences).astype(np.int64)
            sentences = [sentences[index] for index in picked]
        learnt = learn_vocabulary(sentences, vocab_size, max_characters, lower_case, at_most)
        return cls(learnt, lower_case)

    @property
    def vocab_size(self) -> int:
        """The number of pieces, the special ones included."""
        return len(self._vocabulary)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The pieces in the order of their ids."""
        return self._vocabulary

    @property
    def lower_case(self) -> bool:
        """Whether text is lower-cased."""
        return self._lower_case

    def encode(self, sentences: Iterable[str]) -> tf.RaggedTensor:
        """Return the ids of sentences, without start and end.

        Args:
            sentences: the sentences, not a single string.

        Returns:
            Ids [sentences, (pieces)], int32.

        Raises:
            InputError: a single string was given.
        """
        ids, row_splits = self.encode_to_numpy(sentences)
        return tf.RaggedTensor.from_row_splits(ids, row_splits, validate=False)

    def encode_to_numpy(self, sentences: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `encode`, as arrays: sentence i is `ids[row_splits[i]:row_splits[i + 1]]`.

        Returns:
            `(ids, row_splits)`: int32 [pieces of all sentences], int64 [sentences + 1].
        """
        if isinstance(sentences, (str, bytes)):
            raise InputError("encode takes a list of sentences: put the string into a list")
        ids = [np.array(row, np.int32) for row in encoded(self._library, sentences)]
        row_splits = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return np.concatenate([np.zeros(0, np.int32), *ids]), row_splits

    def decode(self, ids: tf.RaggedTensor | tf.Tensor | np.ndarray | Sequence) -> list[str]:
        """Return the text of ids.

        A sentence stops at its first end id; pad and start ids leave no trace.

        Args:
            ids: one sentence a row: array or tensor [sentences, pieces],
                `tf.RaggedTensor`, or a list of lists.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_list()
        elif isinstance(ids, tf.Tensor):
            ids = ids.numpy()
        return [self._decode_row(np.asarray(row, dtype=np.int64)) for row in ids]

    def _decode_row(self, row):
        if row.ndim != 1:
            raise InputError("decode takes one row of ids a sentence: put a single row in a list")
        ends = np.flatnonzero(row == END)
        if ends.size:
            row = row[: ends[0]]
        outside = row[(row < 0) | (row >= self.vocab_size)]
        if outside.size:
            raise InputError(
                f"id {outside[0]} is outside the vocabulary 0…{self.vocab_size - 1}: decode "
                "with the tokenizer that the model was trained with"
            )
        return re.sub(" +", " ", unescape("".join(self._texts[row]))).strip(" ")

    def encode_with_offsets(
        self, sentences: Iterable[str], others: Iterable[str] | None = None
    ) -> list[Encoding]:
        """Return the ids of texts, or of pairs of texts, with the characters that each stands for.

        Pairs have the start token before them and the end token after each text; see
        `PublishedTokenizer.encode_with_offsets`.
        """
        return encodings(self._library, sentences, others)

    @functools.cached_property
    def _library(self):
        fields = tokenizer_fields(self._vocabulary, self._unknown(), self._lower_case)
        library = made({**fields, "added_tokens": []})  # a special piece in a text is none
        library.post_processor = tokenizers.processors.TemplateProcessing(
            pair="[START] $A [END] $B:1 [END]:1",
            special_tokens=[("[START]", START), ("[END]", END)],
        )
        return library

    def save(self, folder: str | os.PathLike) -> None:
        """Write `subword_tokenizer.json` and `vocab.txt` (a piece a line) into a folder.

        Besides `tokenizer.json` and `tokenizer_config.json`, by which the libraries `tokenizers` and
        `transformers` give the same ids and texts.

        Args:
            folder: where to write; it is made where it is missing.

        Raises:
            InputError: the folder cannot be written, or has another tokenizer.
        """
        folder = Path(folder)
        taken = [folder / x for x in (_PUBLISHED_FILE, CONFIG, _VOCABULARY_FILE)]
        taken = [path for path in taken if path.exists()]
        if taken and not (folder / _CONFIG_FILE).exists() and not self._is_older(folder):
            raise InputError(f"{taken[0]}: is another tokenizer's: give another folder")
        config = {
            "format": _FORMAT,
            "version": _VERSION,
            "vocab_size": self.vocab_size,
            "lower_case": self._lower_case,
        }
        write_text_atomically(folder / _VOCABULARY_FILE, "\n".join(self._vocabulary) + "\n")
        own = tokenizer_fields(self._vocabulary, self._unknown(), self._lower_case)
        contents = {_PUBLISHED_FILE: own, CONFIG: config_fields(), _CONFIG_FILE: config}
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            write_text_atomically(folder / name, text + "\n")
        self.save_template(folder)

    @staticmethod
    def _is_older(folder):
        """Return whether a folder is of before the file of other libraries had its name."""
        file = folder / _PUBLISHED_FILE
        if not file.is_file() or (folder / CONFIG).exists():
            return False
        return f'"format": "{_FORMAT}"' in file.read_text("utf-8", "replace")[:1000]

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "SubwordTokenizer":
        """Read what `save` wrote; the ids are the same.

        Raises:
            InputError: a file is missing or damaged, or of a newer format.
        """
        folder = check_path(folder)
        config_file = _PUBLISHED_FILE if cls._is_older(folder) else _CONFIG_FILE
        for name in (config_file, _VOCABULARY_FILE):
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder} holds no tokenizer ({name} is missing): give the folder that "
                    "SubwordTokenizer.save wrote, or train again"
                )
        config = _read_config(folder / config_file)
        path = folder / _VOCABULARY_FILE
        vocabulary = decode_lines(read_bytes(path, _MAX_VOCABULARY_BYTES), path)
        if len(vocabulary) != config["vocab_size"]:
            raise InputError(
                f"{path} has {len(vocabulary)} pieces where {config_file} says "
                f"{shown(config['vocab_size'])}: the file is damaged; copy the folder again"
            )
        try:
            found = cls(vocabulary, config["lower_case"])
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        found.load_template(folder)
        return found

    def _unknown(self):
        """Return a regular expression of the characters that are no pieces."""
        characters = characters_of(self._vocabulary)
        return "[^" + "".join(rf"\x{{{ord(c):x}}}" for c in characters + [SPACE]) + "]"


def _read_config(path):
    config = typed(read_json(path, _MAX_CONFIG_BYTES), _Config, path)
    if config["format"] != _FORMAT:
        raise InputError(f"{path} is not of format {_FORMAT}: give a tokenizer's folder")
    if config["version"] != _VERSION:
        raise InputError(
            f"{path} has format version {shown(config['version'])}, and this dtransformer reads "
            f"{_VERSION}: update dtransformer"
        )
    return config
