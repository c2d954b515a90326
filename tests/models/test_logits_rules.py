"""Logits rules match plain loops over texts. `test_published.py` compares with `transformers`."""

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
    """Return the set of allowed next ids for each row."""
    return [set(np.flatnonzero(row > NEVER / 2)) for row in np.asarray(logits)]


def make_texts():
    """Return prompts of different lengths, generated ids and the current position, 4."""
    rng = np.random.default_rng(1)
    texts, generated = (rng.integers(0, 4, (5, length), "int32") for length in (6, 9))
    for row in range(5):
        texts[row, : max(row, 0)] = NO_TOKEN
    return texts, generated, 4


def full_texts(texts, generated, position):
    """Return prompts with their generated ids as lists."""
    rows = np.concatenate([texts, generated[:, :position]], axis=1)
    return [[int(x) for x in row if x != NO_TOKEN] for row in rows]


def apply_rules(**options):
    texts, generated, position = make_texts()
    logits = random_logits()
    options = GenerationOptions(**options)
    rules = tf.function(logits_rules.apply_history_rules, autograph=False)
    changed = rules(tf.constant(logits), options, texts, generated, tf.constant(position))
    return logits, changed.numpy(), full_texts(texts, generated, position)


def test_repetition_penalty_changes_ids_in_the_text_only():
    logits, changed, rows = apply_rules(repetition_penalty=2.0)
    for before, after, row in zip(logits, changed, rows, strict=True):
        is_in_text = np.isin(np.arange(VOCAB), row)
        expected = np.where(before < 0, 2 * before, before / 2)
        np.testing.assert_allclose(after, np.where(is_in_text, expected, before))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_no_ngram_occurs_twice(size):
    """Texts have 6 to 10 tokens with 4 different ids. Padding before a text is ignored."""
    _, changed, rows = apply_rules(no_repeat_ngram_size=size)
    for ids, row in zip(allowed(changed), rows, strict=True):
        ngrams = [row[i : i + size] for i in range(len(row) - size + 1)]
        prefix = row[len(row) - size + 1 :] if size > 1 else []
        banned = {x for x in range(VOCAB) if [*prefix, x] in ngrams}
        assert ids == set(range(VOCAB)) - banned


@pytest.mark.parametrize("threshold", [1e-6, 0.2, 0.7, 0.95, 1.0])
def test_top_p_keeps_the_smallest_likely_set(threshold):
    logits = random_logits()
    for ids, row in zip(allowed(logits_rules.top_p(logits, threshold)), logits, strict=True):
        p = np.exp(row.astype("float64"))
        p /= p.sum()
        order = np.argsort(-p)
        num_kept = 1 + np.searchsorted(np.cumsum(p[order]), threshold) if threshold < 1 else VOCAB
        assert ids == set(order[:num_kept])


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.3, 1.0])
def test_min_p_compares_with_the_most_likely_id(threshold):
    logits = random_logits()
    for ids, row in zip(allowed(logits_rules.min_p(logits, threshold)), logits, strict=True):
        assert ids == set(np.flatnonzero(np.exp(row - row.max()) >= threshold))


def test_top_k_and_forbidden_ids():
    logits = random_logits()
    for k in (0, 1, 4, VOCAB, 99):
        expected = [set(np.argsort(-row)[: k or VOCAB]) for row in logits]
        assert allowed(logits_rules.top_k(logits, k)) == expected
    changed = logits_rules.without_ids(logits, (3, 7))
    assert allowed(changed) == 5 * [set(range(VOCAB)) - {3, 7}]
