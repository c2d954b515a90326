"""A sample of documents: texts spread evenly over all, to train a tokenizer on."""

from collections.abc import Iterable, Iterator

from dtransformer.datasets.documents import Document

_TRAINED_ON = 2**26  # characters that a tokenizer is trained on, at most


def texts_of(documents: Iterable[Document]) -> Iterator[str]:
    """Return the texts of documents, each part of them one."""
    for document in documents:
        yield from [document] if isinstance(document, str) else document


def evenly_spread(texts: Iterable[str], most: int = _TRAINED_ON) -> list[str]:
    """Return texts spread evenly over all, of so many characters at most, and one at least.

    Example:

    >>> evenly_spread(["a", "b", "c", "d", "e", "f", "g"], most=4)
    ['a', 'c', 'e', 'g']
    """
    kept, size, step = [], 0, 1
    for index, text in enumerate(texts):
        if index % step:
            continue
        kept.append(text)
        size += len(text)
        while size > most and len(kept) > 1:
            kept, step = kept[::2], 2 * step
            size = sum(map(len, kept))
    return kept
