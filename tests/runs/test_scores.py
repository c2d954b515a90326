"""Scores of labels, entities and vectors match scikit-learn, seqeval and NumPy."""

import numpy as np
import pytest

from dtransformer.runs.scores import entities, macro_f1, retrieval

TYPES = "PER", "LOC"
NAMES = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in TYPES)]


def seqeval_entities(labels):
    """Return entities by seqeval's two rules: where a chunk ends, and where one starts."""

    def ends(before, after, before_type, after_type):
        if before in "ES":
            return True
        if before in "BI" and after in "BSO":
            return True
        return before != "O" and before_type != after_type

    def starts(before, after, before_type, after_type):
        if after in "BS":
            return True
        if before in "ESO" and after in "EI":
            return True
        return after != "O" and before_type != after_type

    result, first, before, before_type = set(), 0, "O", ""
    for place, label in enumerate([*labels, "O"]):
        after, _, after_type = label.partition("-")
        if ends(before, after, before_type, after_type):
            result.add((first, place, before_type))
        if starts(before, after, before_type, after_type):
            first = place
        before, before_type = after, after_type
    return result


@pytest.mark.parametrize("seed", range(20))
def test_entities_match_seqeval(seed):
    rng = np.random.default_rng(seed)
    labels = rng.choice(NAMES, 40).tolist()
    assert entities(labels) == seqeval_entities(labels)


def test_labels_without_prefixes_are_no_entities():
    assert entities(["O", "NOUN", "X-Y", "B"]) == set()


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_is_the_mean_over_classes_that_occur(seed):
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(0, 6, (2, 25))
    scores = []
    for label in sorted({*labels.tolist(), *predicted.tolist()}):
        true_positives = np.sum((labels == label) & (predicted == label))
        precision = true_positives / max(np.sum(predicted == label), 1)
        recall = true_positives / max(np.sum(labels == label), 1)
        scores.append(2 * precision * recall / (precision + recall) if true_positives else 0.0)
    assert macro_f1(labels, predicted) == pytest.approx(np.mean(scores))


@pytest.mark.parametrize("seed", range(5))
def test_retrieval_matches_sorted_similarities(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 30, 50)
    ids = np.unique(ids, return_inverse=True)[1]
    texts = rng.normal(size=(30, 8))[ids] * 3  # equal texts have equal vectors
    queries = texts + 4 * rng.normal(size=texts.shape)
    ranks = []
    for query, text_id in zip(queries, ids):
        cosines = {}
        for text, index in zip(texts, ids):
            cosines[index] = query @ text / np.linalg.norm(query) / np.linalg.norm(text)
        ranked = sorted(cosines, key=cosines.get, reverse=True)
        ranks.append(ranked.index(text_id) + 1)
    result = retrieval(queries, texts, ids)
    for k in (1, 5, 10):
        assert result[f"recall@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
    assert result["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert 0 < result["recall@1"] < result["recall@10"]


def test_recall_of_collapsed_vectors_is_0():
    """A collapsed network has no recall, although no text is nearer than the right one."""
    result = retrieval(np.ones((20, 4)), np.ones((20, 4)), np.arange(20))
    assert result == {"recall@1": 0, "recall@5": 0, "recall@10": 0, "mrr": pytest.approx(1 / 20)}
    zeros = retrieval(np.zeros((3, 4)), np.zeros((3, 4)), np.arange(3))
    assert zeros["mrr"] == pytest.approx(1 / 3)
