"""Samples of documents for training a tokenizer."""

from collections.abc import Iterable, Iterator

from dtransformer.datasets.documents import Document

_MAX_CHARACTERS = 2**26  # Maximum number of characters.


def iterate_texts(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the texts of documents. A document with parts yields each part."""
    for document in documents:
        yield from [document] if isinstance(document, str) else document


def sample_evenly(texts: Iterable[str], max_characters: int = _MAX_CHARACTERS) -> list[str]:
    """Return a sample of texts, evenly spaced over all of them.

    The sample contains every k-th text. The step k is the smallest power of 2 that limits the
    sample to `max_characters` characters. It always contains at least one text if there is any.

    Args:
        texts: Iterable of strings. It is read once, and only the sample is kept in memory.
        max_characters: Integer. Maximum number of characters of the sample. Defaults to `2**26`.

    Returns:
        List of strings, in the order of `texts`.

    Example:

    >>> sample_evenly(["a", "b", "c", "d", "e", "f", "g"], max_characters=4)
    ['a', 'c', 'e', 'g']
    """
    sample = []
    size = 0
    step = 1
    for index, text in enumerate(texts):
        if index % step:
            continue
        sample.append(text)
        size += len(text)
        while size > max_characters and len(sample) > 1:
            sample = sample[::2]
            step = 2 * step
            size = sum(map(len, sample))
    return sample
