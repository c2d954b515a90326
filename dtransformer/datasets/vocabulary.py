"""Vocabularies of subword pieces: what they consist of, and how one is learnt from text.

The pieces are the four special ones, every character of the text, alone and inside a word, and the
pieces that the WordPiece learner found, the most frequent first.
"""

import collections
import math
from collections.abc import Iterable, Sequence

from tensorflow_text.tools.wordpiece_vocab import wordpiece_tokenizer_learner_lib as learner

from dtransformer.datasets.words import ESCAPED_ESCAPE, ESCAPED_SPACE, SPACE, counted_words
from dtransformer.errors import InputError, shown

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[START]", "[END]")
PAD, UNK, START, END = range(4)
INSIDE = "##"  # begins the pieces inside a word
MAX_PIECE_BYTES = 256  # that TensorFlow's tokenizer takes
UNKNOWN_CHARACTER = "\ufffd"  # stands for characters without a piece; has none itself


def text_of(piece: str) -> str:
    """Return the text of a piece that is not special.

    Example:

    >>> text_of("##ing")
    'ing'
    """
    return piece.removeprefix(INSIDE)


def characters_of(vocabulary: Sequence[str]) -> list[str]:
    """Return the characters that are pieces of a vocabulary, sorted."""
    pieces = vocabulary[len(SPECIAL_PIECES) :]
    return sorted(piece for piece in pieces if len(piece) == 1 and piece != SPACE)


def check_vocabulary(vocabulary: tuple[str, ...]) -> None:
    """Refuse pieces that cannot have been learnt, and would not come back as text.

    Raises:
        InputError: a special piece is missing, or a piece is repeated or damaged.
    """
    if vocabulary[: len(SPECIAL_PIECES)] != SPECIAL_PIECES:
        raise InputError(
            f"a vocabulary begins with {' '.join(SPECIAL_PIECES)}, this one with "
            f"{shown(' '.join(vocabulary[: len(SPECIAL_PIECES)]))}: use one that train made"
        )
    pieces = set(vocabulary)
    if len(pieces) != len(vocabulary):
        twice = next(p for p, n in collections.Counter(vocabulary).items() if n > 1)
        raise InputError(f"piece {shown(twice)} is in the vocabulary twice: copy the file again")
    characters = {*characters_of(vocabulary), SPACE}
    for number, piece in enumerate(vocabulary[len(SPECIAL_PIECES) :], len(SPECIAL_PIECES) + 1):
        text = text_of(piece)
        if not text or "\0" in text or not characters.issuperset(text):
            raise InputError(
                f"line {number}: piece {shown(piece)} has characters that are not pieces themselves: "
                "the vocabulary is damaged; copy it again"
            )
        if len(piece.encode()) > MAX_PIECE_BYTES:
            raise InputError(
                f"line {number}: piece {shown(piece)} has more than {MAX_PIECE_BYTES} bytes: the "
                "vocabulary is damaged; copy it again"
            )


def learn_vocabulary(
    sentences: Iterable[str],
    vocab_size: int,
    max_characters: int,
    lower_case: bool = False,
    at_most: bool = False,
) -> list[str]:
    """Return exactly `vocab_size` pieces: the special ones, characters, and learnt ones.

    Args:
        sentences: text of all languages that share the vocabulary.
        vocab_size: number of pieces.
        max_characters: number of distinct characters, the most frequent ones, that become
            pieces.
        lower_case: whether the text is lower-cased first.
        at_most: whether a text that has fewer pieces gives those that it has.

    Raises:
        InputError: there is no text, or the vocabulary is smaller than its characters need or
            larger than it can fill.
    """
    words = counted_words(sentences, lower_case)
    if not words:
        raise InputError(
            "the sentences to train a tokenizer hold no text at all: give at least one line of text"
        )
    characters = _alphabet(words, max_characters)
    base = [*SPECIAL_PIECES, SPACE, *characters, *(INSIDE + c for c in characters)]
    if vocab_size < len(base):
        raise InputError(
            f"vocab_size={vocab_size} is too small: {len(characters)} characters of the text need "
            f"{len(base)} pieces; ask for more pieces or lower max_characters ({max_characters})"
        )
    known = {*characters, SPACE}
    words = {word: count for word, count in words.items() if known.issuperset(word)}

    def vocabulary_at(threshold):
        # The learner's own search looks for a size that is near enough; one threshold at a
        # time lets ours find the size exactly, and in fewer passes over the words.
        learnt = learner.learn(
            words,
            vocab_size,
            reserved_tokens=[],
            upper_thresh=threshold,
            lower_thresh=threshold,
            max_input_tokens=max(20_000, 3 * vocab_size),  # rarer words hardly change a piece
            max_unique_chars=len(known),
            joiner=INSIDE,
        )
        return list(dict.fromkeys([*base, *learnt]))

    found = _search_threshold(vocabulary_at, vocab_size, sum(words.values()), at_most)
    return found[:vocab_size]


def _alphabet(words, max_characters):
    """Return the characters that get pieces, sorted: the most frequent, and those of escapes."""
    counts = collections.Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    for character in (SPACE, UNKNOWN_CHARACTER, "\0"):  # the trie's keys end at a NUL
        counts.pop(character, None)
    frequent = sorted(counts, key=lambda c: (-counts[c], c))[:max_characters]
    return sorted({*frequent, *ESCAPED_SPACE, *ESCAPED_ESCAPE})


def _search_threshold(vocabulary_at, vocab_size, num_words, at_most):
    """Find the vocabulary with the highest threshold that has `vocab_size` pieces.

    Pieces come most frequent first, so the surplus is dropped from the end; up to 10 % of
    surplus ends the search early. The size falls about as threshold ** -0.6.
    """
    enough, too_high = 0, num_words + 2  # thresholds known to give enough, too few pieces
    threshold = max(1, num_words // (40 * vocab_size))
    best, largest = None, []
    while too_high - enough > 1:
        threshold = min(max(threshold, enough + 1), too_high - 1)
        vocabulary = vocabulary_at(threshold)
        largest = max(largest, vocabulary, key=len)
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
    if best is None and not at_most:
        raise InputError(
            f"vocab_size={vocab_size} is too large for the text, which gives at most {len(largest)} "
            f"pieces: ask for at most {len(largest)} or give more text"
        )
    return best or largest
