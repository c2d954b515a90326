"""Scores that are not means over rows: F1, retrieval, correlations and perplexities.

Perplexity per token depends on the tokenizer. Perplexities per byte and per word do not. They are
exp(−log p / n), where log p is the sum over all predicted tokens, and n is the number of UTF-8 bytes
or whitespace-separated words of the text of these tokens (Gao et al., 2020, "The Pile", arXiv
2101.00027, §3.1).
"""

import itertools
import math
from collections.abc import Iterable, Sequence

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


def retrieval(vectors: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Return the recall at 1, 5 and 10 and the scores of `ranking` for queries and their texts.

    Each distinct query is compared by cosine similarity with all distinct texts of the records. The
    positive texts of equal queries are relevant to these queries. Recall is the fraction of a
    query's relevant texts that have a rank of at most k.

    Args:
        vectors: Float array [n, k, h]. Vectors of each record's query, its positive text, and its
            k - 2 negative texts.
        ids: Int array [n, k]. Ids of these texts. Equal texts have equal ids, and missing texts have
            the id 0.

    Example:

    >>> vectors = np.array([[[1.0, 0.0], [1.0, 0.1]], [[0.0, 1.0], [1.0, 0.0]]])
    >>> scores = retrieval(vectors, np.array([[1, 2], [3, 4]]))
    >>> scores["recall@1"], scores["recall@5"], scores["mrr"]
    (0.0, 1.0, 0.5)
    """
    text_ids, places = np.unique(ids[:, 1:], return_index=True)
    texts = vectors[:, 1:].reshape(-1, vectors.shape[-1])[places]
    texts = texts / np.maximum(np.linalg.norm(texts, axis=1, keepdims=True), 1e-12)
    is_text = text_ids > 0
    query_ids, places = np.unique(ids[:, 0], return_index=True)
    order = np.argsort(ids[:, 0], kind="stable")
    bounds = np.searchsorted(ids[order, 0], query_ids[1:])
    ranks = []
    for place, rows in zip(places, np.split(order, bounds)):
        is_relevant = np.zeros(len(texts), bool)
        is_relevant[np.searchsorted(text_ids, ids[rows, 1])] = True
        similarities = texts @ vectors[place, 0]
        ranks.append(relevant_ranks(similarities[is_text], is_relevant[is_text]))
    recalls = {f"recall@{k}": _recall(ranks, k) for k in (1, 5, 10)}
    return {**recalls, **ranking(ranks)}


def _recall(ranks, k):
    return float(np.mean([np.mean(x <= k) for x in ranks]))


def relevant_ranks(scores: np.ndarray, is_relevant: np.ndarray) -> np.ndarray:
    """Return the ranks of a query's relevant texts in ascending order, counted from 1.

    Other texts with the same score as a relevant text rank before it.

    Args:
        scores: Float array [n]. Scores of the texts.
        is_relevant: Bool array [n]. At least one text is relevant.

    Example:

    >>> relevant_ranks(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False]))
    array([1, 3])
    """
    relevant = -np.sort(-scores[is_relevant])
    others = scores[~is_relevant]
    num_before = np.array([np.sum(others >= score) for score in relevant])
    return num_before + np.arange(1, len(relevant) + 1)


def ranking(ranks: Sequence[np.ndarray], k: int = 10) -> dict[str, float]:
    """Return the mean reciprocal rank (MRR), the MRR at k, and nDCG at k, averaged over queries.

    The reciprocal rank of a query is 1 / rank of its first relevant text. At k it is 0 if this rank
    exceeds k. nDCG is Σ 1 / log₂(1 + rank) over relevant texts of rank k or less, divided by the
    largest possible sum (Järvelin & Kekäläinen, 2002).

    Args:
        ranks: Sequence with an int array for each query, see `relevant_ranks`.
        k: Integer. Defaults to `10`.

    Example:

    >>> {name: round(x, 3) for name, x in ranking([np.array([1]), np.array([3])]).items()}
    {'mrr': 0.667, 'mrr@10': 0.667, 'ndcg@10': 0.75}
    """

    def gain(values):
        return np.sum(1 / np.log2(1 + values[values <= k]))

    first = np.array([x[0] for x in ranks])
    gains = [gain(x) / gain(np.arange(1, len(x) + 1)) for x in ranks]
    return {
        "mrr": float(np.mean(1 / first)),
        f"mrr@{k}": float(np.mean(np.where(first <= k, 1 / first, 0.0))),
        f"ndcg@{k}": float(np.mean(gains)),
    }


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
