"""A subword tokenizer whose text comes back exactly.

Text is cut in three steps, each of which can be undone:

1. Normalise: Unicode NFC; runs of white space become one space, none at the ends.
   A no-break space is a character like any other.
2. Cut into words: every space becomes the mark `▁` in front of the next word. A word is
   a run of letters, or one character of any other kind, so that digits and punctuation
   stand alone. A mark that stands in the text itself is escaped.
3. Cut words into pieces of the vocabulary (WordPiece): the longest piece first, pieces
   inside a word begin with `##`.

So `L'été dure 30 s ?` becomes `▁L ' été ▁dure ▁3 0 ▁s ▁?`, and joining the pieces and
turning marks into spaces gives the text again. Every character of the training text is
a piece of its own, so only characters never seen there are unknown.

Reference: Wu et al., Google's Neural Machine Translation System, 2016, section 4.1;
Song et al., Fast WordPiece Tokenization, EMNLP 2021.
"""

import collections
import json
import math
import re
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_text as tf_text
from tensorflow_text.tools.wordpiece_vocab import (
    wordpiece_tokenizer_learner_lib as learner,
)

from dtransformer.datasets.sgm import decode_lines, read_bytes, write_text_atomically
from dtransformer.errors import InputError

_SPECIAL_PIECES = ("[PAD]", "[UNK]", "[START]", "[END]")
_PAD, _UNK, _START, _END = range(4)

_SPACE = "▁"  # U+2581, a space in front of the word
_ESCAPE = "▂"  # U+2582; in the text itself "▁" becomes "▂1" and "▂" becomes "▂2"
_ESCAPED_SPACE, _ESCAPED_ESCAPE = _ESCAPE + "1", _ESCAPE + "2"
_INSIDE = "##"
_UNKNOWN_CHARACTER = "\ufffd"  # stands for characters without a piece; has none itself
_UNKNOWN_TEXT = " ⁇ "

_WHITE_SPACE = r"[ \t\v\f\r\n]+"
_WORD = rf"{_SPACE}?[\p{{L}}\p{{M}}]+|{_SPACE}?[^\p{{L}}\p{{M}}{_SPACE}]"

_FORMAT, _VERSION = "dtransformer.SubwordTokenizer", 1
_CONFIG_FILE, _VOCABULARY_FILE = "tokenizer.json", "vocab.txt"

_CHUNK = 8192  # sentences a call of the compiled functions sees


class SubwordTokenizer:
    """Turns sentences into ids of subword pieces and back, without loss.

    `decode(encode(text))` gives the text again, up to Unicode NFC, runs of white space
    (one space remains) and characters that the training text lacked (`⁇`). Make one
    with `SubwordTokenizer.train` or `SubwordTokenizer.load`.

    Args:
        vocabulary: Pieces in the order of their ids: `[PAD]`, `[UNK]`, `[START]`,
            `[END]`, then the pieces of text.
        lower_case: Whether text is lower-cased first; it comes back in lower case.

    Example:
        >>> tokenizer = SubwordTokenizer.train(["L'été dure.", "L'été part."], vocab_size=36)
        >>> ids = tokenizer.encode(["L'été part."])  # tf.RaggedTensor [1, (pieces)]
        >>> tokenizer.decode(ids)
        ["L'été part."]
    """

    pad_id, unk_id, start_id, end_id = _PAD, _UNK, _START, _END

    def __init__(self, vocabulary, lower_case=False):
        self._vocabulary = tuple(vocabulary)
        self._lower_case = bool(lower_case)
        _check_vocabulary(self._vocabulary)
        texts = [p[len(_INSIDE) :] if p.startswith(_INSIDE) else p for p in self._vocabulary]
        texts[_PAD] = texts[_START] = texts[_END] = ""
        texts[_UNK] = _UNKNOWN_TEXT
        self._texts = np.array(texts, dtype=object)
        # Made at the first use: a mesh that starts later resets TensorFlow's context, and
        # constants made before it would be lost.
        self._encode_chunk = None

    @classmethod
    def train(
        cls, sentences, vocab_size, max_sentences=None, lower_case=False, max_characters=1000
    ):
        """Learns a vocabulary of exactly `vocab_size` pieces from text.

        The result depends on the sentences only, not on chance.

        Args:
            sentences: Sentences of all languages that share the vocabulary, an iterable
                of strings.
            vocab_size: Number of pieces, the four special ones included.
            max_sentences: Learn from at most so many sentences, spread evenly over all.
            lower_case: Whether to lower-case text.
            max_characters: So many distinct characters, the most frequent ones, become
                pieces (two each: at the beginning of a word and inside); others are
                unknown.

        Returns:
            A `SubwordTokenizer`.

        Raises:
            InputError: No text, a vocabulary smaller than the alphabet needs, or larger
                than the text can fill, with the size that it can.
        """
        sentences = list(sentences)
        if max_sentences is not None and len(sentences) > max_sentences:
            picked = np.linspace(0, len(sentences) - 1, max_sentences).astype(np.int64)
            sentences = [sentences[index] for index in picked]
        words = _count_words(sentences, lower_case)
        if not words:
            raise InputError(
                f"{len(sentences)} sentences without any text were given to train a tokenizer: "
                f"give at least one line of text."
            )
        return cls(_learn_vocabulary(words, vocab_size, max_characters), lower_case)

    @property
    def vocab_size(self):
        """Number of pieces, the special ones included."""
        return len(self._vocabulary)

    @property
    def vocabulary(self):
        """The pieces in the order of their ids, a tuple of strings."""
        return self._vocabulary

    @property
    def lower_case(self):
        """Whether text is lower-cased."""
        return self._lower_case

    def encode(self, sentences):
        """Returns the ids of sentences, without start and end.

        Args:
            sentences: A list of strings.

        Returns:
            `tf.RaggedTensor` [sentences, (pieces)], int32.
        """
        ids, row_splits = self.encode_to_numpy(sentences)
        return tf.RaggedTensor.from_row_splits(ids, row_splits, validate=False)

    def encode_to_numpy(self, sentences):
        """As `encode`, as arrays: sentence i is `ids[row_splits[i]:row_splits[i + 1]]`.

        Args:
            sentences: A list of strings.

        Returns:
            `(ids, row_splits)`: int32 [pieces of all], int64 [sentences + 1].
        """
        if isinstance(sentences, (str, bytes)):
            raise InputError("encode takes a list of sentences: put the string into a list.")
        if self._encode_chunk is None:
            self._encode_chunk = self._compile()
        ids, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for chunk_ids, chunk_lengths in _map_chunks(self._encode_chunk, sentences):
            ids.append(chunk_ids)
            lengths.append(chunk_lengths)
        row_splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
        return np.concatenate(ids), row_splits

    def decode(self, ids):
        """Returns the text of ids.

        A sentence stops at its first end id; pad and start ids leave no trace.

        Args:
            ids: One sentence a row: array or tensor [sentences, pieces],
                `tf.RaggedTensor`, or a list of lists.

        Returns:
            A list of strings.

        Raises:
            InputError: An id outside the vocabulary.
        """
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_list()
        elif isinstance(ids, tf.Tensor):
            ids = ids.numpy()
        return [self._decode_row(np.asarray(row, dtype=np.int64)) for row in ids]

    def _decode_row(self, row):
        if row.ndim != 1:
            raise InputError("decode takes one row of ids a sentence: put a single row in a list.")
        ends = np.flatnonzero(row == _END)
        if ends.size:
            row = row[: ends[0]]
        outside = row[(row < 0) | (row >= self.vocab_size)]
        if outside.size:
            raise InputError(
                f"id {outside[0]} lies outside the vocabulary 0…{self.vocab_size - 1}: decode "
                f"with the tokenizer that the model was trained with."
            )
        text = "".join(self._texts[row]).replace(_SPACE, " ")
        text = text.replace(_ESCAPED_SPACE, _SPACE).replace(_ESCAPED_ESCAPE, _ESCAPE)
        return re.sub(" +", " ", text).strip(" ")

    def save(self, folder):
        """Writes `tokenizer.json` and `vocab.txt` (a piece a line) into a folder.

        Args:
            folder: Where to write; made where it is missing.

        Raises:
            InputError: The place cannot be written.
        """
        folder = Path(folder)
        config = {
            "format": _FORMAT,
            "version": _VERSION,
            "vocab_size": self.vocab_size,
            "lower_case": self._lower_case,
        }
        write_text_atomically(folder / _VOCABULARY_FILE, "\n".join(self._vocabulary) + "\n")
        write_text_atomically(folder / _CONFIG_FILE, json.dumps(config, indent=2) + "\n")

    @classmethod
    def load(cls, folder):
        """Reads what `save` wrote.

        Args:
            folder: The folder.

        Returns:
            A `SubwordTokenizer` that gives the same ids.

        Raises:
            InputError: A missing or damaged file, a newer format.
        """
        folder = Path(folder)
        for name in (_CONFIG_FILE, _VOCABULARY_FILE):
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder} holds no tokenizer ({name} is missing): name the folder that "
                    f"SubwordTokenizer.save wrote, or train again."
                )
        config = _read_config(folder / _CONFIG_FILE)
        path = folder / _VOCABULARY_FILE
        vocabulary = decode_lines(read_bytes(path), path)
        if len(vocabulary) != config["vocab_size"]:
            raise InputError(
                f"{path} has {len(vocabulary)} pieces where {_CONFIG_FILE} says "
                f"{config['vocab_size']}: the file is damaged; copy the folder again."
            )
        try:
            return cls(vocabulary, config["lower_case"])
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def _compile(self):
        lower_case = self._lower_case
        characters = _characters_of(self._vocabulary)
        unknown = "[^" + "".join(rf"\x{{{ord(c):x}}}" for c in characters + [_SPACE]) + "]"
        wordpiece = tf_text.FastWordpieceTokenizer(
            self._vocabulary,
            suffix_indicator=_INSIDE,
            max_bytes_per_word=1_000_000,  # longer words would be unknown as a whole
            token_out_type=tf.int32,
            unknown_token=_SPECIAL_PIECES[_UNK],
            no_pretokenization=True,
        )

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def encode_chunk(sentences):
            text = tf.strings.regex_replace(
                _normalise(sentences, lower_case), unknown, _UNKNOWN_CHARACTER
            )
            pieces = wordpiece.tokenize(_split_words(text)).merge_dims(-2, -1)
            return pieces.flat_values, pieces.row_lengths()

        return encode_chunk


# Text to words -------------------------------------------------------------------------


def _normalise(sentences, lower_case):
    """Strings [n] with spaces turned into marks and marks escaped (steps 1 and 2)."""
    if lower_case:
        sentences = tf.strings.lower(sentences, encoding="utf-8")
    text = tf_text.normalize_utf8(sentences, "NFC")
    text = tf.strings.regex_replace(text, _ESCAPE, _ESCAPED_ESCAPE)
    text = tf.strings.regex_replace(text, _SPACE, _ESCAPED_SPACE)
    text = tf.strings.regex_replace(text, f"^{_WHITE_SPACE}|{_WHITE_SPACE}$", "")
    text = tf.strings.regex_replace(text, _WHITE_SPACE, _SPACE)
    return tf.where(text == "", text, tf.strings.join([_SPACE, text]))


def _split_words(text):
    """Ragged strings [n, (words)]; no white space is left in `text`, so it can separate."""
    return tf.strings.split(tf.strings.regex_replace(text, _WORD, r"\0 "))


def _map_chunks(function, sentences):
    """Yields a compiled function's results, as arrays, over chunks of sentences."""
    sentences = tf.constant(list(sentences), dtype=tf.string)
    chunks = tf.data.Dataset.from_tensor_slices(sentences).batch(_CHUNK)
    chunks = chunks.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return chunks.as_numpy_iterator()


def _count_words(sentences, lower_case):
    """Returns {word: count}, most frequent first, ties in the order of characters."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def count(chunk):
        words = _split_words(_normalise(chunk, lower_case)).flat_values
        unique, _, counts = tf.unique_with_counts(words)
        return unique, counts

    total = collections.Counter()
    for unique, counts in _map_chunks(count, sentences):
        total.update(dict(zip(unique.tolist(), counts.tolist())))
    total.pop(b"", None)
    words = ((word.decode("utf-8"), number) for word, number in total.items())
    return dict(sorted(words, key=lambda item: (-item[1], item[0])))


# Words to a vocabulary -----------------------------------------------------------------


def _learn_vocabulary(words, vocab_size, max_characters):
    """Returns exactly `vocab_size` pieces: special ones, characters, learned ones."""
    characters = _alphabet(words, max_characters)
    base = [*_SPECIAL_PIECES, _SPACE, *characters, *(_INSIDE + c for c in characters)]
    if vocab_size < len(base):
        raise InputError(
            f"vocab_size={vocab_size} is too small: {len(characters)} characters of the text need "
            f"{len(base)} pieces. Ask for more pieces or lower max_characters ({max_characters})."
        )
    known = {*characters, _SPACE}
    words = {word: count for word, count in words.items() if known.issuperset(word)}

    def vocabulary_at(threshold):
        # The learner's own search looks for a size that is near enough; one threshold at a
        # time lets ours find the size exactly, and in fewer passes over the words.
        learned = learner.learn(
            words,
            vocab_size,
            reserved_tokens=[],
            upper_thresh=threshold,
            lower_thresh=threshold,
            max_input_tokens=max(20_000, 3 * vocab_size),  # rarer words hardly change a piece
            max_unique_chars=len(known),
            joiner=_INSIDE,
        )
        return list(dict.fromkeys([*base, *learned]))

    return _search_threshold(vocabulary_at, vocab_size, sum(words.values()))[:vocab_size]


def _search_threshold(vocabulary_at, vocab_size, num_words):
    """Finds the vocabulary with the highest threshold that has `vocab_size` pieces.

    Pieces come most frequent first, so the surplus is cut from the end; up to 10 % of
    surplus ends the search early. The size falls about as threshold ** -0.6.
    """
    enough, too_high = 0, num_words + 2  # thresholds known to give enough, too few pieces
    threshold = max(1, num_words // (40 * vocab_size))
    best, largest = None, 0
    while too_high - enough > 1:
        threshold = min(max(threshold, enough + 1), too_high - 1)
        vocabulary = vocabulary_at(threshold)
        largest = max(largest, len(vocabulary))
        if len(vocabulary) >= vocab_size:
            best, enough = vocabulary, threshold
            if len(vocabulary) <= 1.1 * vocab_size:
                break
        else:
            too_high = threshold
        guess = threshold * (len(vocabulary) / (1.05 * vocab_size)) ** (1 / 0.6)
        middle = math.sqrt(max(enough, 1) * too_high)
        # The power law is a good guide from afar and may stall near the goal.
        threshold = round(guess if enough < guess < too_high else middle)
    if best is None:
        raise InputError(
            f"vocab_size={vocab_size} is too large for the text, which gives at most {largest} "
            f"pieces: ask for at most {largest} or give more text."
        )
    return best


def _alphabet(words, max_characters):
    """Sorted characters that get pieces: the most frequent, and those escapes need."""
    counts = collections.Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    for character in (_SPACE, _UNKNOWN_CHARACTER, "\0"):  # the trie's keys end at a NUL
        counts.pop(character, None)
    frequent = sorted(counts, key=lambda c: (-counts[c], c))[:max_characters]
    return sorted({*frequent, *_ESCAPED_SPACE, *_ESCAPED_ESCAPE})


# Vocabulary files ----------------------------------------------------------------------


def _characters_of(vocabulary):
    return sorted(p for p in vocabulary[len(_SPECIAL_PIECES) :] if len(p) == 1 and p != _SPACE)


def _check_vocabulary(vocabulary):
    """Refuses pieces that `train` cannot have made: they would not come back as text."""
    if vocabulary[: len(_SPECIAL_PIECES)] != _SPECIAL_PIECES:
        raise InputError(
            f"a vocabulary begins with {' '.join(_SPECIAL_PIECES)}, this one with "
            f"{' '.join(vocabulary[: len(_SPECIAL_PIECES)])!r}: use one that train made."
        )
    pieces = set(vocabulary)
    if len(pieces) != len(vocabulary):
        twice = next(p for p, n in collections.Counter(vocabulary).items() if n > 1)
        raise InputError(f"piece {twice!r} stands twice in the vocabulary: copy the file again.")
    characters = {*_characters_of(vocabulary), _SPACE}
    for number, piece in enumerate(vocabulary[len(_SPECIAL_PIECES) :], len(_SPECIAL_PIECES) + 1):
        text = piece[len(_INSIDE) :] if piece.startswith(_INSIDE) else piece
        if not text or "\0" in text or not characters.issuperset(text):
            raise InputError(
                f"line {number}: piece {piece!r} has characters that are no pieces themselves: "
                f"the vocabulary is damaged; copy it again."
            )


def _read_config(path):
    try:
        config = json.loads("\n".join(decode_lines(read_bytes(path), path)))
        known = config["format"] == _FORMAT
        version = int(config["version"])
        values = {key: config[key] for key in ("vocab_size", "lower_case")}
        if type(values["vocab_size"]) is not int or type(values["lower_case"]) is not bool:
            raise TypeError("vocab_size is a number, lower_case true or false")
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}): copy the folder again."
        ) from None
    if not known:
        raise InputError(f"{path} is not of format {_FORMAT}: name a tokenizer's folder.")
    if version > _VERSION:
        raise InputError(
            f"{path} has format version {version}, this dtransformer reads up to {_VERSION}: "
            f"update dtransformer."
        )
    return values
