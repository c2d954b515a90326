"""Scores of predictions that are no means over rows, and perplexity: by token, by byte and by word.

Perplexity by token depends on the tokenizer; those by byte and by word do not, and are
exp(−log p / n) of the same log p, that of all tokens which count, with n the bytes in UTF-8, or the
words between white space, of the text that these tokens stand for (Gao et al., 2020, "The Pile",
arXiv 2101.00027, §3.1).
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np


def macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean F1 of the classes that occur or are predicted. Arguments are int [n].

    Example:

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1]))
    0.6666666666666666
    """
    counts = np.bincount(np.concatenate([labels, predicted]))
    correct = np.bincount(labels[labels == predicted], minlength=len(counts))
    return float(np.mean(2 * correct[counts > 0] / counts[counts > 0]))


def entities(labels: Iterable[str]) -> set[tuple[int, int, str]]:
    """Return the (start, end, type) of each entity in the labels of words, by conlleval's rule.

    An entity continues from `B-` or `I-` to `I-` or `E-` of the same type. Every other label with one
    of these prefixes or `S-` begins an entity.

    Example:

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    """
    found, start = set(), 0
    pairs = itertools.pairwise([*labels, "O"])
    for end, (label, after) in enumerate(pairs, start=1):
        kind = label[2:]
        if label[:2] in ("B-", "I-") and after in (f"I-{kind}", f"E-{kind}"):
            continue
        if label[:2] in ("B-", "I-", "E-", "S-"):
            found.add((start, end, kind))
        start = end
    return found


def retrieval(queries: np.ndarray, texts: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Return the recall at 1, 5 and 10 and the mean reciprocal rank (MRR) of pairs.

    Each query is compared with all distinct texts by cosine. The rank of its own text is the number
    of texts that are at least as near.

    Args:
        queries: Float array [n, h].
        texts: Float array [n, h]. Row i is the text of query i.
        ids: Int array [n]. Equal texts have the same id, counted from 0.

    Example:

    >>> found = retrieval(np.eye(2), np.array([[1.0, 0.1], [1.0, 0.0]]), np.array([0, 1]))
    >>> found["recall@1"], found["recall@5"], found["mrr"]
    (0.0, 1.0, 0.5)
    """
    texts = texts[np.unique(ids, return_index=True)[1]]
    texts = texts / np.maximum(np.linalg.norm(texts, axis=1, keepdims=True), 1e-12)
    scores = (texts @ query for query in queries)
    ranks = np.array([np.sum(x >= x[own]) for x, own in zip(scores, ids)])
    recalls = {f"recall@{k}": float(np.mean(ranks <= k)) for k in (1, 5, 10)}
    return {**recalls, "mrr": float(np.mean(1 / ranks))}


def matthews(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the correlation of classes and predicted ones (Gorodkin, 2004); 0 where one is constant.

    Example:

    >>> matthews(np.array([0, 1, 2]), np.array([0, 1, 2]))
    1.0
    """
    classes = np.union1d(labels, predicted)
    own, their = ((x[:, None] == classes).astype(float) for x in (labels, predicted))
    return _correlation(own, their)


def spearman(values: np.ndarray, predicted: np.ndarray) -> float:
    """Return the correlation of ranks, ties sharing theirs; 0 where one is constant.

    Example:

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    return _correlation(_ranks(values), _ranks(predicted))


def _correlation(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    size = np.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / size) if size else 0.0


def _ranks(x):
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]


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
