"""Scores of labels, entities and vectors match scikit-learn, seqeval and NumPy."""

import numpy as np
import pytest

from dtransformer.runs.scores import entities, macro_f1, ranking, relevant_ranks, retrieval

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


def ranked_lists(vectors, ids):
    """Return for each distinct query the ids of all texts by decreasing cosine, and the relevant ids."""
    texts = {}
    relevant = {}
    for row, row_ids in zip(vectors, ids):
        relevant.setdefault(row_ids[0], (row[0], set()))[1].add(row_ids[1])
        texts.update({i: x for i, x in zip(row_ids[1:], row[1:]) if i})
    result = []
    for query, positives in relevant.values():
        cosines = {
            i: query @ x / np.linalg.norm(query) / np.linalg.norm(x) for i, x in texts.items()
        }
        result.append((sorted(cosines, key=cosines.get, reverse=True), positives))
    return result


@pytest.mark.parametrize("seed", range(5))
def test_retrieval_matches_sorted_similarities(seed):
    """Records share queries and texts, and have up to three negative texts."""
    rng = np.random.default_rng(seed)
    text_vectors = rng.normal(size=(60, 8)) * 3
    ids = rng.integers(1, 60, (50, 5))
    ids[:, 3:] *= rng.random((50, 2)) < 0.5
    ids[:, 0] = rng.integers(1, 30, 50)
    vectors = text_vectors[ids]
    noise = 4 * rng.normal(size=(60, 8))
    vectors[:, 0] += noise[ids[:, 0]]
    expected = {"recall@1": [], "recall@5": [], "recall@10": [], "mrr": [], "mrr@10": []}
    expected["ndcg@10"] = []
    for order, positives in ranked_lists(vectors, ids):
        hits = [i in positives for i in order]
        for k in (1, 5, 10):
            expected[f"recall@{k}"].append(sum(hits[:k]) / len(positives))
        first = hits.index(True) + 1
        expected["mrr"].append(1 / first)
        expected["mrr@10"].append(1 / first if first <= 10 else 0)
        discounts = 1 / np.log2(np.arange(2, 12))
        gain = sum(discount for discount, hit in zip(discounts, hits) if hit)
        expected["ndcg@10"].append(gain / sum(discounts[: len(positives)]))
    result = retrieval(vectors, ids)
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        assert result[name] == pytest.approx(np.mean(values)), name
        assert 0 < result["ndcg@10"] < 1


def test_texts_with_equal_scores_rank_before_the_relevant_text():
    scores = np.array([0.5, 0.5, 0.5, 0.2])
    assert relevant_ranks(scores, np.array([True, False, False, False])).tolist() == [3]
    assert relevant_ranks(scores, np.array([True, True, False, True])).tolist() == [2, 3, 4]


def test_ranks_above_ten_do_not_count():
    result = ranking([np.array([11, 12]), np.array([2, 20])])
    assert result["mrr@10"] == 0.25 and result["mrr"] == pytest.approx((1 / 11 + 1 / 2) / 2)
    assert result["ndcg@10"] == pytest.approx(0.5 / np.log2(3) / (1 + 1 / np.log2(3)))


def test_recall_of_collapsed_vectors_is_0():
    """A collapsed network has no recall, although no text is nearer than the right one."""
    ids = np.arange(1, 41).reshape(20, 2)
    result = retrieval(np.ones((20, 2, 4)), ids)
    assert result.pop("mrr") == pytest.approx(1 / 20)
    assert set(result.values()) == {0} and "ndcg@10" in result
    assert retrieval(np.zeros((3, 2, 4)), ids[:3])["mrr"] == pytest.approx(1 / 3)
