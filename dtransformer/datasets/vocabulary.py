"""Vocabularies of subword pieces and their training.

A vocabulary consists of the four special pieces, each character of the text twice (at the beginning
of a word and inside), and the most frequent merges that the library `tokenizers` finds.
"""

import collections
from collections.abc import Iterable, Sequence

import tokenizers

from dtransformer.datasets.published_form import (
    ESCAPED_ESCAPE,
    ESCAPED_SPACE,
    INSIDE,
    SPACE,
    SPECIAL_PIECES,
    UNKNOWN_CHARACTER,
    build_tokenizer,
    tokenizer_fields,
)
from dtransformer.errors import InputError, short_repr
from dtransformer.inputs.text import whole_texts


def get_characters(vocabulary: Sequence[str]) -> list[str]:
    """Return a sorted list of the characters that are pieces of a vocabulary."""
    pieces = vocabulary[len(SPECIAL_PIECES) :]
    return sorted(piece for piece in pieces if len(piece) == 1 and piece != SPACE)


def check_vocabulary(vocabulary: tuple[str, ...]) -> None:
    """Check that a vocabulary can restore text: special pieces first, and all others valid.

    Raises:
        InputError: If a special piece is missing, or a piece is repeated, empty or contains a
            character that is not a piece.
    """
    if vocabulary[: len(SPECIAL_PIECES)] != SPECIAL_PIECES:
        raise InputError(
            f"A vocabulary must begin with {' '.join(SPECIAL_PIECES)}, got "
            f"{short_repr(' '.join(vocabulary[: len(SPECIAL_PIECES)]))}. Use one from "
            "`SubwordTokenizer.train`."
        )
    characters = {*get_characters(vocabulary), SPACE}
    seen = {*SPECIAL_PIECES}
    for piece in vocabulary[len(SPECIAL_PIECES) :]:
        text = piece.removeprefix(INSIDE)
        if piece in seen or not text or not characters.issuperset(text):
            raise InputError(
                f"Piece {short_repr(piece)} is repeated, empty or contains characters that are not "
                "pieces. The vocabulary is damaged; copy it again."
            )
        seen.add(piece)


def learn_vocabulary(
    sentences: Iterable[str],
    vocab_size: int,
    max_characters: int,
    lower_case: bool = False,
    allow_smaller: bool = False,
) -> list[str]:
    """Return exactly `vocab_size` pieces: special pieces, characters and learnt pieces.

    Args:
        sentences: Iterable of sentences, in all languages that share the vocabulary.
        vocab_size: Integer. Number of pieces.
        max_characters: Integer. Maximum number of distinct characters, the most frequent ones,
            that become pieces.
        lower_case: Boolean. Whether the text is converted to lower case first. Defaults to `False`.
        allow_smaller: Boolean. Whether to return fewer pieces if the text has fewer. Defaults to
            `False`.

    Returns:
        List of pieces in the order of their ids.

    Raises:
        InputError: If there is no text, or `vocab_size` is too small for the characters or too
            large for the text.
    """
    texts = whole_texts(sentences)
    counts = collections.Counter()
    fields = tokenizer_fields(SPECIAL_PIECES, (), lower_case)
    fields["normalizer"]["normalizers"].pop()  # Remove the replacement of unknown characters.
    library = build_tokenizer(fields)
    for text in texts:
        counts.update(library.normalizer.normalize_str(text))
    for character in (SPACE, UNKNOWN_CHARACTER, "\0"):
        counts.pop(character, None)
    if not counts:
        raise InputError(
            "The sentences to train a tokenizer on contain no text. Give at least one line of text."
        )
    frequent = sorted(counts, key=lambda c: (-counts[c], c))[:max_characters]
    characters = sorted({*frequent, *ESCAPED_SPACE, *ESCAPED_ESCAPE})
    required = [*SPECIAL_PIECES, SPACE, *characters, *(INSIDE + c for c in characters)]
    if vocab_size < len(required):
        raise InputError(
            f"`{vocab_size=}` is too small: {len(characters)} characters of the text need "
            f"{len(required)} pieces. Increase it or lower `{max_characters=}`."
        )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=required,  # They keep this order.
        initial_alphabet=[SPACE, *characters],
        limit_alphabet=1 + len(characters),
        continuing_subword_prefix=INSIDE,
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    ids = library.get_vocab()
    if len(ids) < vocab_size and not allow_smaller:
        raise InputError(
            f"`{vocab_size=}` is too large for the text, which yields at most {len(ids)} pieces. "
            f"Set it to at most {len(ids)} or use more text."
        )
    return sorted(ids, key=ids.get)
