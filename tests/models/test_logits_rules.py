"""Rules of logits, against plain loops over texts; `test_published.py` compares `transformers`."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.models.generation import logits_rules
from dtransformer.models.generation.logits_rules import NEVER, NO_TOKEN
from dtransformer.models.generation.options import GenerationOptions

VOCAB = 11


def random_logits(rows=5):
    return np.random.default_rng(0).normal(0, 2, (rows, VOCAB)).astype("float32")


def allowed(logits):
    """Return the set of ids of each row that may be next."""
    return [set(np.flatnonzero(row > NEVER / 2)) for row in np.asarray(logits)]


def texts_and_found():
    """Prompts of different lengths, and what was found after them up to position 4."""
    rng = np.random.default_rng(1)
    texts, found = (rng.integers(0, 4, (5, length), "int32") for length in (6, 9))
    for row in range(5):
        texts[row, : max(row, 0)] = NO_TOKEN
    return texts, found, 4


def whole(texts, found, position):
    """Return each text with what was found, as lists."""
    rows = np.concatenate([texts, found[:, :position]], axis=1)
    return [[int(x) for x in row if x != NO_TOKEN] for row in rows]


def by_rules(**options):
    texts, found, position = texts_and_found()
    logits = random_logits()
    options = GenerationOptions(**options)
    rules = tf.function(logits_rules.apply_history_rules, autograph=False)
    changed = rules(tf.constant(logits), options, texts, found, tf.constant(position))
    return logits, changed.numpy(), whole(texts, found, position)


def test_repetition_penalty():
    logits, changed, rows = by_rules(repetition_penalty=2.0)
    for before, after, row in zip(logits, changed, rows, strict=True):
        is_there = np.isin(np.arange(VOCAB), row)
        expected = np.where(before < 0, 2 * before, before / 2)
        np.testing.assert_allclose(after, np.where(is_there, expected, before))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_no_ngram_twice(size):
    """Texts as short as 5 tokens, of 4 kinds; no token before a text's first counts."""
    _, changed, rows = by_rules(no_repeat_ngram_size=size)
    for ids, row in zip(allowed(changed), rows, strict=True):
        ngrams = [row[i : i + size] for i in range(len(row) - size + 1)]
        begun = row[len(row) - size + 1 :] if size > 1 else []
        banned = {x for x in range(VOCAB) if [*begun, x] in ngrams}
        assert ids == set(range(VOCAB)) - banned


@pytest.mark.parametrize("share", [1e-6, 0.2, 0.7, 0.95, 1.0])
def test_top_p_keeps_the_fewest_that_are_as_likely(share):
    logits = random_logits()
    for ids, row in zip(allowed(logits_rules.top_p(logits, share)), logits, strict=True):
        p = np.exp(row.astype("float64"))
        p /= p.sum()
        order = np.argsort(-p)
        number = 1 + np.searchsorted(np.cumsum(p[order]), share) if share < 1 else VOCAB
        assert ids == set(order[:number])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_min_p(share):
    logits = random_logits()
    for ids, row in zip(allowed(logits_rules.min_p(logits, share)), logits, strict=True):
        assert ids == set(np.flatnonzero(np.exp(row - row.max()) >= share))


def test_top_k_and_ids_that_are_never_next():
    logits = random_logits()
    for number in (0, 1, 4, VOCAB, 99):
        kept = [set(np.argsort(-row)[: number or VOCAB]) for row in logits]
        assert allowed(logits_rules.top_k(logits, number)) == kept
    changed = logits_rules.without_ids(logits, (3, 7))
    assert allowed(changed) == 5 * [set(range(VOCAB)) - {3, 7}]
