"""Perplexity of texts: by token, by byte and by word.

By token it depends on the tokenizer; those by byte and by word do not, and are exp(−log p / n) of the
same log p, that of all tokens which count, with n the bytes in UTF-8, or the words between white
space, of the text that these tokens stand for (Gao et al., 2020, "The Pile", arXiv 2101.00027, §3.1).
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np

_MAX_EXPONENT = 700.0


def perplexities(
    loss: float, spans: Iterable[np.ndarray], num_tokens: int, tokenizer: object
) -> dict[str, float]:
    """Return `perplexity`, which is by token, `byte_perplexity` and `word_perplexity`.

    Args:
        loss: the mean of −log p over the tokens that count.
        spans: the ids of tokens that count and follow each other, int arrays.
        num_tokens: the number of tokens that count, those without text among them.
        tokenizer: what says their text.

    Example:

    >>> import types
    >>> tokenizer = types.SimpleNamespace(decode=lambda rows: ["four or five" for _ in rows])
    >>> found = perplexities(math.log(2), [np.ones(6)], 6, tokenizer)
    >>> {name: round(value, 3) for name, value in found.items()}
    {'perplexity': 2.0, 'byte_perplexity': 1.414, 'word_perplexity': 4.0}
    """
    found, spans = np.zeros(2, np.int64), iter(spans)
    while some := list(itertools.islice(spans, 1024)):
        texts = tokenizer.decode(some)
        found += [
            sum(len(x.encode(errors="replace")) for x in texts),
            sum(len(x.split()) for x in texts),
        ]
    each = {"perplexity": num_tokens, "byte_perplexity": found[0], "word_perplexity": found[1]}
    return {
        name: math.exp(min(loss * num_tokens / number, _MAX_EXPONENT))
        for name, number in each.items()
        if number
    }


def learnt_spans(ids: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the ids that are predicted, those together that follow each other.

    Args:
        ids: int [n], of a sequence, whose first one is not predicted.
        labels: int [n]; -100 where nothing is learnt.

    Example:

    >>> learnt_spans(np.arange(5), np.array([0, 1, -100, 3, 4]))
    [array([1]), array([3, 4])]
    """
    places = np.flatnonzero(labels[1:] != -100) + 1
    return [ids[x] for x in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(x)]
