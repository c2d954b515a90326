"""Scores that are not means over rows: F1, retrieval, correlations and perplexities.

Perplexity per token depends on the tokenizer. Perplexities per byte and per word do not. They are
exp(−log p / n), where log p is the sum over all predicted tokens, and n is the number of UTF-8 bytes
or whitespace-separated words of the text of these tokens (Gao et al., 2020, "The Pile", arXiv
2101.00027, §3.1).
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np


def macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the unweighted mean of the F1 scores of all classes that occur or are predicted.

    Args:
        labels: Int array [n]. Class ids.
        predicted: Int array [n]. Predicted class ids.

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
    spans = set()
    start = 0
    pairs = itertools.pairwise([*labels, "O"])
    for end, (label, after) in enumerate(pairs, start=1):
        entity_type = label[2:]
        if label[:2] in ("B-", "I-") and after in (f"I-{entity_type}", f"E-{entity_type}"):
            continue
        if label[:2] in ("B-", "I-", "E-", "S-"):
            spans.add((start, end, entity_type))
        start = end
    return spans


def retrieval(queries: np.ndarray, texts: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Return the recall at 1, 5 and 10 and the mean reciprocal rank (MRR) of pairs.

    Each query is compared with all distinct texts by cosine similarity. The rank of its text is the
    number of texts with at least the same similarity.

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
    ranks = np.array([np.sum(x >= x[target]) for x, target in zip(scores, ids)])
    recalls = {f"recall@{k}": float(np.mean(ranks <= k)) for k in (1, 5, 10)}
    return {**recalls, "mrr": float(np.mean(1 / ranks))}


def matthews(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the Matthews correlation of classes and predicted classes (Gorodkin, 2004).

    The result is 0 if `labels` or `predicted` has a single class.

    Args:
        labels: Int array [n]. Class ids.
        predicted: Int array [n]. Predicted class ids.

    Example:

    >>> matthews(np.array([0, 1, 2]), np.array([0, 1, 2]))
    1.0
    """
    classes = np.union1d(labels, predicted)
    actual, guessed = ((x[:, None] == classes).astype(float) for x in (labels, predicted))
    return _correlation(actual, guessed)


def spearman(values: np.ndarray, predicted: np.ndarray) -> float:
    """Return Spearman's rank correlation. Equal values have the mean of their ranks.

    The result is 0 if one of the arrays is constant.

    Args:
        values: Float array [n].
        predicted: Float array [n].

    Example:

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    return _correlation(_ranks(values), _ranks(predicted))


def _correlation(x, y):
    x = x - x.mean(0)
    y = y - y.mean(0)
    size = np.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / size) if size else 0.0


def _ranks(x):
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]


_MAX_EXPONENT = 700.0


def perplexities(
    loss: float, spans: Iterable[np.ndarray], num_tokens: int, tokenizer: object
) -> dict[str, float]:
    """Return a dict of `perplexity` (per token), `byte_perplexity` and `word_perplexity`.

    Counts of 0 are left out. Exponents are limited to 700, so that results are finite.

    Args:
        loss: Float. Mean of −log p over all predicted tokens.
        spans: Iterable of int arrays. Ids of predicted tokens, one array per contiguous text.
        num_tokens: Integer. Number of predicted tokens, including tokens without text.
        tokenizer: Tokenizer with `decode(rows)`.

    Example:

    >>> import types
    >>> tokenizer = types.SimpleNamespace(decode=lambda rows: ["four or five" for _ in rows])
    >>> found = perplexities(math.log(2), [np.ones(6)], 6, tokenizer)
    >>> {name: round(value, 3) for name, value in found.items()}
    {'perplexity': 2.0, 'byte_perplexity': 1.414, 'word_perplexity': 4.0}
    """
    sizes = np.zeros(2, np.int64)
    spans = iter(spans)
    while batch := list(itertools.islice(spans, 1024)):
        texts = tokenizer.decode(batch)
        sizes += [
            sum(len(x.encode(errors="replace")) for x in texts),
            sum(len(x.split()) for x in texts),
        ]
    counts = {"perplexity": num_tokens, "byte_perplexity": sizes[0], "word_perplexity": sizes[1]}
    return {
        name: math.exp(min(loss * num_tokens / count, _MAX_EXPONENT))
        for name, count in counts.items()
        if count
    }


def get_labeled_spans(ids: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return the ids with labels as a list of arrays, one per contiguous span.

    Args:
        ids: Int array [n]. Ids of a sequence. The first id is never predicted.
        labels: Int array [n]. -100 marks ids without a label.

    Example:

    >>> get_labeled_spans(np.arange(5), np.array([0, 1, -100, 3, 4]))
    [array([1]), array([3, 4])]
    """
    positions = np.flatnonzero(labels[1:] != -100) + 1
    return [
        ids[x] for x in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(x)
    ]
