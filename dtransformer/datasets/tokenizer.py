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
from collections.abc import Iterable

import tokenizers

from dtransformer.datasets.published_form import (
    SPECIAL_PIECES,
    config_fields,
    made,
    tokenizer_fields,
)
from dtransformer.datasets.published_tokenizer import BaseTokenizer
from dtransformer.datasets.special_tokens import CONFIG, optional_fields
from dtransformer.datasets.vocabulary import characters_of, check_vocabulary, learn_vocabulary
from dtransformer.errors import InputError
from dtransformer.files import adding_to
from dtransformer.inputs.files import MEBIBYTE, check_path
from dtransformer.inputs.json_file import read_json

FILE = "tokenizer.json"
_KIND = {"trained_by": "dtransformer.SubwordTokenizer"}  # of `tokenizer_config.json`
_OLDER = "subword_tokenizer.json"  # beside the other files, of older versions
_MAX_BYTES = 128 * MEBIBYTE
_PAD, _UNK, _START, _END = range(4)


class SubwordTokenizer(BaseTokenizer):
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

    pad_id, unk_id, start_id, end_id = _PAD, _UNK, _START, _END
    stop_ids = (_END,)

    def __init__(self, vocabulary: Iterable[str], lower_case: bool = False):
        self.vocabulary, self.lower_case = tuple(vocabulary), bool(lower_case)
        self.vocab_size = len(self.vocabulary)
        check_vocabulary(self.vocabulary)

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        lower_case: bool = False,
        max_characters: int = 1000,
        at_most: bool = False,
    ) -> "SubwordTokenizer":
        """Learn a vocabulary of exactly `vocab_size` pieces from text.

        The result depends on the sentences only, not on chance.

        Args:
            sentences: sentences of all languages that share the vocabulary.
            vocab_size: number of pieces, the four special ones included.
            lower_case: whether text is lower-cased.
            max_characters: number of distinct characters, the most frequent ones, that become
                pieces (two each: at the beginning of a word and inside); others are
                unknown.
            at_most: whether a text that has fewer pieces gives those that it has.

        Raises:
            InputError: there is no text, or the vocabulary is smaller than its characters need,
                or larger than it can fill; the message has the size that it can.
        """
        learnt = learn_vocabulary(sentences, vocab_size, max_characters, lower_case, at_most)
        return cls(learnt, lower_case)

    def save(self, folder: str | os.PathLike) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into a folder.

        By them the libraries `tokenizers` and `transformers` give the same ids and texts.

        Args:
            folder: where to write; it is made where it is missing.

        Raises:
            InputError: the folder cannot be written, or has another tokenizer.
        """
        with adding_to(folder) as fresh:
            for name, content in ((FILE, self._fields()), (CONFIG, config_fields() | _KIND)):
                text = json.dumps(content, indent=2, ensure_ascii=False)
                (fresh / name).write_text(text + "\n", encoding="utf-8", newline="")
            self.save_template(fresh)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "SubwordTokenizer":
        """Read what `save` wrote; the ids are the same.

        Raises:
            InputError: a file is missing or damaged, or of another tokenizer.
        """
        folder = check_path(folder)
        content = read_json(folder / FILE, _MAX_BYTES)
        try:
            numbers = content["model"]["vocab"]
            first = content["normalizer"]["normalizers"][0]
            found = cls(sorted(numbers, key=numbers.get), first == {"type": "Lowercase"})
            own = found._fields() | {"decoder": content["decoder"]}  # older ones have fewer steps
            why = "" if own == content else "its fields are others"
        except (AttributeError, TypeError):
            why = "its fields are others"
        except (LookupError, InputError) as error:
            why = str(error)
        if why:
            raise InputError(
                f"{folder / FILE}: is no tokenizer that SubwordTokenizer.save wrote, or is damaged "
                f"({why}): copy the folder again, or train again"
            )
        found.load_template(folder)
        return found

    @staticmethod
    def is_in(folder: str | os.PathLike) -> bool:
        """Return whether the files of a folder are those of a `SubwordTokenizer`."""
        folder = check_path(folder)
        is_marked = _KIND.items() <= optional_fields(folder / CONFIG).items()
        return is_marked or (folder / _OLDER).is_file()

    def _fields(self):
        return tokenizer_fields(self.vocabulary, characters_of(self.vocabulary), self.lower_case)

    @functools.cached_property
    def _library(self):
        library, (*_, start, end) = made(self._fields()), SPECIAL_PIECES
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {end} $B:1 {end}:1",
            special_tokens=[(start, _START), (end, _END)],
        )
        return library

    def _id_of(self, token):
        return None  # a word has the piece with its space: that which a text is encoded to

    def _texts(self, rows):
        rows = [[one for one in row if one not in (_PAD, _START, _END)] for row in rows]
        texts = self._library.decode_batch(rows, skip_special_tokens=False)
        return [" ".join(filter(None, text.split(" "))) for text in texts]
