"""A lossless subword tokenizer.

Encoding has three steps. Each one can be undone:

1. Normalize: apply Unicode NFC, replace runs of white space by one space, and strip the ends.
   A no-break space is an ordinary character.
2. Split into words: the mark `▁` replaces the space before each word. A word is a run of letters
   or a single other character, so digits and punctuation are separate words. A `▁` in the text
   itself is escaped.
3. Split words into pieces of the vocabulary (WordPiece), longest piece first. Pieces inside a word
   begin with `##`.

For example, `L'été dure 30 s ?` becomes `▁L ' été ▁dure ▁3 0 ▁s ▁?`. Joining the pieces and
turning marks into spaces restores the text. Every character of the training text is a piece, so
only characters that it lacks are unknown.

Reference:
    Wu et al., Google's Neural Machine Translation System, 2016, section 4.1;
    Song et al., Fast WordPiece Tokenization, EMNLP 2021.
"""

import functools
import json
import os
from collections.abc import Iterable

import tokenizers

from dtransformer.datasets.published_form import (
    SPECIAL_PIECES,
    build_tokenizer,
    config_fields,
    tokenizer_fields,
)
from dtransformer.datasets.published_tokenizer import BaseTokenizer
from dtransformer.datasets.special_tokens import CONFIG, optional_fields
from dtransformer.datasets.vocabulary import check_vocabulary, get_characters, learn_vocabulary
from dtransformer.errors import InputError
from dtransformer.files import add_to_folder
from dtransformer.inputs.files import MEBIBYTE, check_path
from dtransformer.inputs.json_file import read_json

FILE = "tokenizer.json"
_CONFIG_MARK = {"trained_by": "dtransformer.SubwordTokenizer"}  # Marks the config.
_LEGACY_FILE = "subword_tokenizer.json"  # An additional file of older versions.
_MAX_BYTES = 128 * MEBIBYTE
_PAD, _UNK, _START, _END = range(4)


class SubwordTokenizer(BaseTokenizer):
    """Lossless tokenizer that splits sentences into subword pieces.

    `decode(encode(text))` restores the text, except that it is in Unicode NFC, runs of white space
    are single spaces, and characters that the training text lacked are `⁇`. Create a tokenizer
    with `SubwordTokenizer.train` or `SubwordTokenizer.load`.

    Args:
        vocabulary: Iterable of the pieces in the order of their ids: `[PAD]`, `[UNK]`, `[START]`,
            `[END]`, then the pieces of text.
        lower_case: Boolean. Whether text is converted to lower case. Decoding does not restore the
            case. Defaults to `False`.

    Raises:
        InputError: If a special piece is missing, or a piece is repeated or damaged.

    Example:

    >>> tokenizer = SubwordTokenizer.train(["L'été dure.", "L'été part."], vocab_size=36)
    >>> ids = tokenizer.encode(["L'été part."])  # tf.RaggedTensor [1, (pieces)]
    >>> tokenizer.decode(ids)
    ["L'été part."]
    """

    pad_id = _PAD
    unk_id = _UNK
    start_id = _START
    end_id = _END
    stop_ids = (_END,)

    def __init__(self, vocabulary: Iterable[str], lower_case: bool = False):
        self.vocabulary = tuple(vocabulary)
        self.lower_case = bool(lower_case)
        self.vocab_size = len(self.vocabulary)
        check_vocabulary(self.vocabulary)

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        lower_case: bool = False,
        max_characters: int = 1000,
        allow_smaller: bool = False,
    ) -> "SubwordTokenizer":
        """Learn a vocabulary of exactly `vocab_size` pieces from text.

        The result is deterministic.

        Args:
            sentences: Iterable of sentences, in all languages that share the vocabulary.
            vocab_size: Integer. Number of pieces, including the four special pieces.
            lower_case: Boolean. Whether text is converted to lower case. Defaults to `False`.
            max_characters: Integer. Maximum number of distinct characters, the most frequent ones,
                that become pieces (two each: at the beginning of a word and inside). Other
                characters are unknown. Defaults to 1000.
            allow_smaller: Boolean. Whether to return a smaller vocabulary if the text has fewer pieces,
                instead of raising an error. Defaults to `False`.

        Returns:
            A `SubwordTokenizer`.

        Raises:
            InputError: If there is no text, or `vocab_size` is too small for the characters or too
                large for the text. The message contains a possible size.
        """
        vocabulary = learn_vocabulary(
            sentences, vocab_size, max_characters, lower_case, allow_smaller
        )
        return cls(vocabulary, lower_case)

    def save(self, folder: str | os.PathLike) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into a folder.

        The libraries `tokenizers` and `transformers` load these files and return the same ids and
        texts. A custom chat template is also saved.

        Args:
            folder: Path of the folder. It is created if it does not exist.

        Raises:
            InputError: If the folder cannot be written or contains another tokenizer.
        """
        with add_to_folder(folder) as fresh:
            for name, content in ((FILE, self._fields()), (CONFIG, config_fields() | _CONFIG_MARK)):
                text = json.dumps(content, indent=2, ensure_ascii=False)
                (fresh / name).write_text(text + "\n", encoding="utf-8", newline="")
            self.save_template(fresh)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "SubwordTokenizer":
        """Load a tokenizer that `save` wrote, with the same ids.

        Args:
            folder: Path of the folder.

        Raises:
            InputError: If a file is missing, damaged or belongs to another kind of tokenizer.
        """
        folder = check_path(folder)
        content = read_json(folder / FILE, _MAX_BYTES)
        try:
            ids = content["model"]["vocab"]
            normalizer = content["normalizer"]["normalizers"][0]
            tokenizer = cls(sorted(ids, key=ids.get), normalizer == {"type": "Lowercase"})
            # Decoders of older versions have fewer steps.
            expected = tokenizer._fields() | {"decoder": content["decoder"]}
            problem = "" if expected == content else "its fields differ"
        except (AttributeError, TypeError):
            problem = "its fields differ"
        except (LookupError, InputError) as error:
            problem = str(error)
        if problem:
            raise InputError(
                f"{folder / FILE} was not written by `SubwordTokenizer.save` or is damaged ({problem}). "
                "Copy the folder again or train a new tokenizer."
            )
        tokenizer.load_template(folder)
        return tokenizer

    @staticmethod
    def is_in(folder: str | os.PathLike) -> bool:
        """Return whether a folder contains the files of a `SubwordTokenizer`."""
        folder = check_path(folder)
        is_marked = _CONFIG_MARK.items() <= optional_fields(folder / CONFIG).items()
        return is_marked or (folder / _LEGACY_FILE).is_file()

    def _fields(self):
        return tokenizer_fields(self.vocabulary, get_characters(self.vocabulary), self.lower_case)

    @functools.cached_property
    def _library(self):
        library = build_tokenizer(self._fields())
        *_, start, end = SPECIAL_PIECES
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {end} $B:1 {end}:1",
            special_tokens=[(start, _START), (end, _END)],
        )
        return library

    def _token_to_id(self, token):
        return None  # The piece of a word includes its space, so a stop text is encoded instead.

    def _texts(self, rows):
        rows = list(map(_without_special_ids, rows))
        texts = self._library.decode_batch(rows, skip_special_tokens=False)
        return [" ".join(filter(None, text.split(" "))) for text in texts]


def _without_special_ids(row):
    return [token_id for token_id in row if token_id not in (_PAD, _START, _END)]
