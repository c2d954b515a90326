"""Masked tokens, sentence pairs and missing spans have the papers' fractions and restore the text."""

import itertools

import numpy as np
import pytest

from dtransformer.datasets import (
    LanguageModelBatches,
    MaskedLanguageModelBatches,
    NextSentenceBatches,
    SpanCorruptionBatches,
)
from dtransformer.datasets.masked_language_model import num_positions
from dtransformer.datasets.next_sentences import chunks, truncate_pair
from dtransformer.datasets.span_corruption import random_spans, span_counts
from tests.datasets.input_errors import get_error_message
from tests.datasets.small_shards import END, FIRST, PAD, START, some_documents, some_shards

IGNORED, MASK, VOCAB = -100, 30, 30
KINDS = {
    "masked": MaskedLanguageModelBatches,
    "pairs": NextSentenceBatches,
    "spans": SpanCorruptionBatches,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def documents():
    return some_documents(150, 30, parts=6)


@pytest.fixture(scope="module")
def shards(documents, tmp_path_factory):
    return some_shards(tmp_path_factory.mktemp("shards") / "x", documents, shard_tokens=2000)


def some_batches(kind, shards, **options):
    return KINDS[kind](shards, **{"length": 40, "batch_size": 6, "seed": 7, **options})


def epoch_rows(batches):
    """Return all rows of an epoch, a dict of inputs and labels [rows, ...]."""
    batches = list(batches.as_dataset().as_numpy_iterator())
    inputs = {key: np.concatenate([x[key] for x, _ in batches]) for key in batches[0][0]}
    if isinstance(batches[0][1], dict):
        labels = {key: np.concatenate([y[key] for _, y in batches]) for key in batches[0][1]}
    else:
        labels = {"labels": np.concatenate([y for _, y in batches])}
    return {**inputs, **labels}


def same(item, other):
    return item.keys() == other.keys() and all(
        np.array_equal(item[key], other[key]) for key in item
    )


# Properties of all three.


@each_kind
def test_random_choices_depend_only_on_seed_epoch_and_row(kind, shards):
    batches = some_batches(kind, shards)
    first, again, other = (
        epoch_rows(batches),
        epoch_rows(batches),
        some_batches(kind, shards, seed=8),
    )
    assert same(first, again) and not same(first, epoch_rows(other))
    batches.set_epoch(1)
    assert not same(first, epoch_rows(batches))
    unshuffled = some_batches(kind, shards, shuffle=False)
    assert not same(epoch_rows(unshuffled), first)


@each_kind
def test_ranks_divide_the_batches_of_one_process(kind, shards):
    of_all = list(some_batches(kind, shards).as_dataset().as_numpy_iterator())
    for index in range(2):
        share = some_batches(kind, shards, shard_index=index, num_shards=2)
        for (inputs, labels), (x, y) in zip(share.as_dataset().as_numpy_iterator(), of_all):
            assert same(inputs, {key: value[index::2] for key, value in x.items()})
            if isinstance(y, dict):
                assert same(labels, {key: value[index::2] for key, value in y.items()})
            else:
                np.testing.assert_array_equal(labels, y[index::2])


@each_kind
def test_epoch_resumes_at_the_next_batch(kind, shards):
    batches, resumed = some_batches(kind, shards), some_batches(kind, shards)
    batches.set_epoch(1)
    expected = {key: value[2 * 6 :] for key, value in epoch_rows(batches).items()}
    resumed.restore(batches.position(2))
    assert same(epoch_rows(resumed), expected)


@each_kind
def test_evaluation_batches_are_full(kind, shards):
    batches = some_batches(kind, shards, training=False, batch_size=7)
    rows = epoch_rows(batches)
    assert {len(value) for value in rows.values()} == {7 * len(batches)}
    inputs = ("tokens", "segments", "token_types", "masked_lm_positions", "source", "target")
    for name, value in rows.items():
        if name not in inputs:
            assert (value[batches.num_rows :] == IGNORED).all()


# Masking.


def test_fractions_of_masked_tokens(shards):
    options = {"length": 100, "batch_size": 1, "shuffle": False}
    masked = some_batches("masked", shards, all_positions=True, **options)
    plain = LanguageModelBatches(shards, **options)
    counts = np.zeros(4)
    for epoch in range(5):
        masked.set_epoch(epoch)
        rows, truth = epoch_rows(masked), epoch_rows(plain)
        np.testing.assert_array_equal(rows["segments"], truth["segments"])
        is_label, text = rows["labels"] != IGNORED, truth["tokens"] >= FIRST
        np.testing.assert_array_equal(rows["labels"][is_label], truth["tokens"][is_label])
        np.testing.assert_array_equal(rows["tokens"][~is_label], truth["tokens"][~is_label])
        assert text[is_label].all(), "special tokens are not asked for"
        np.testing.assert_array_equal(is_label.sum(1), np.round(0.15 * text.sum(1)))
        seen, right = rows["tokens"][is_label], rows["labels"][is_label]
        random = (seen != MASK) & (seen != right)
        assert (seen[random] >= FIRST).all() and (seen[random] < VOCAB).all()
        counts += [len(seen), (seen == MASK).sum(), random.sum(), (seen == right).sum()]
    shares = counts[1:] / counts[0]
    np.testing.assert_allclose(shares, [0.8, 0.1 * 25 / 26, 0.1 + 0.1 / 26], atol=0.03)
    assert masked.vocab_size == VOCAB + 1


def test_every_token_is_masked_in_some_epoch(shards):
    options = {"all_positions": True, "shuffle": False}
    batches, requested = some_batches("masked", shards, **options), 0
    for epoch in range(60):
        requested = requested | (batches.row(epoch, 0)[1] != IGNORED)
    assert (requested == (batches.row(0, 0)[0]["segments"] > 0) & (requested > 0)).all()
    assert requested.mean() > 0.8


def test_mask_id_can_be_chosen(shards):
    batches = some_batches("masked", shards, mask_id=FIRST, rate=1.0)
    rows = epoch_rows(batches)
    assert batches.vocab_size == VOCAB
    assert (rows["tokens"] == FIRST).mean() > 0.6


@pytest.mark.parametrize("kind, max_tokens", [("masked", 40), ("pairs", 37)])
@pytest.mark.parametrize("rate", [0.001, 0.15, 1.0])
def test_positions_and_labels_contain_every_masked_token(kind, max_tokens, rate, shards):
    options = {"rate": rate, "training": False, "batch_size": 7}
    rows = epoch_rows(some_batches(kind, shards, **options))
    full = epoch_rows(some_batches(kind, shards, all_positions=True, **options))
    labels_key = "labels" if kind == "masked" else "masked_lm"
    positions, labels = rows.pop("masked_lm_positions"), rows.pop(labels_key)
    full_labels = full.pop(labels_key)
    assert same(rows, full), "the masks do not depend on `all_positions`"
    assert positions.shape == labels.shape == (len(full_labels), max(1, round(rate * max_tokens)))
    restored = np.full_like(full_labels, IGNORED)
    is_label = labels != IGNORED
    restored[np.nonzero(is_label)[0], positions[is_label]] = labels[is_label]
    np.testing.assert_array_equal(restored, full_labels)
    assert is_label.sum() == (full_labels != IGNORED).sum(), "positions do not repeat"
    assert (positions[~is_label] == 0).all()


def test_number_of_positions_is_rounded_up_to_a_multiple(shards):
    assert num_positions(512, 0.15) == 77 and num_positions(512, 0.15, 8) == 80
    for kind in ("masked", "pairs"):
        inputs, _ = some_batches(kind, shards, pad_positions_to_multiple_of=4).row(0, 0)
        assert inputs["masked_lm_positions"].shape == (8,)


# Sentence pairs.


def test_pairs_are_consecutive_or_random(documents, shards):
    options = {"length": 120, "batch_size": 1, "all_positions": True}
    batches = some_batches("pairs", shards, shuffle=False, **options)
    letters = lambda ids: "".join(chr(i - FIRST + ord("a")) for i in ids)
    starts = {"".join(parts[i:j]): index for index, parts in enumerate(documents)
              for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}  # fmt: skip
    kinds = []
    for epoch in range(4):
        for index in range(batches.num_rows):
            inputs, labels = batches.row(epoch, index)
            is_label = labels["masked_lm"] != IGNORED
            ids = np.where(is_label, labels["masked_lm"], inputs["tokens"])
            assert ids[0] == START
            first_end, second_end = np.flatnonzero(ids == END)
            assert (ids[second_end + 1 :] == PAD).all()
            types = np.zeros(len(ids), int)
            types[first_end + 1 : second_end + 1] = 1
            np.testing.assert_array_equal(inputs["token_types"], types)
            first, second = letters(ids[1:first_end]), letters(ids[first_end + 1 : second_end])
            assert first and second
            kinds.append(labels["next_sentence"])
            if labels["next_sentence"] == 0:
                assert first in starts and second in starts and first + second in starts
            elif first in starts:  # This sentence is not truncated.
                assert len(second) < 5 or second not in "".join(documents[starts[first]])
    assert 0.5 <= np.mean(kinds) < 0.65, "half, and the rows of a single sentence"


def test_rows_contain_every_sentence_once(shards):
    for index in range(len(shards.shard_sizes)):
        shard = shards.shard(index)
        first, end = chunks(shard.parts, shard.documents, room=25)
        np.testing.assert_array_equal(first, [0, *end[:-1]])
        assert end[-1] == len(shard.parts) - 1
        sizes = shard.parts[end] - shard.parts[first]
        assert ((sizes <= 25) | (end == first + 1)).all()
        # A row ends with its document, or if the next sentence does not fit.
        inside = ~np.isin(shard.parts[end], shard.documents)
        assert (shard.parts[end[inside] + 1] - shard.parts[first[inside]] > 25).all()


@pytest.mark.parametrize("sizes", [(3, 4), (3, 30), (30, 3), (30, 40), (10, 11), (1, 100)])
def test_longer_text_is_cut_first(sizes):
    first, second = np.arange(sizes[0]), 100 + np.arange(sizes[1])
    beginnings = set()
    for seed in range(20):
        item, other = truncate_pair(first, second, 20, np.random.default_rng(seed))
        assert len(item) + len(other) == min(sum(sizes), 20)
        assert len(item) >= min(sizes[0], 10) and len(other) >= min(sizes[1], 10)
        assert (np.diff(item) == 1).all() and (np.diff(other) == 1).all()
        beginnings.add((item[0], other[0]))
    assert (len(beginnings) > 1) == (sum(sizes) > 20)


def test_pairs_require_sentences_and_two_documents(tmp_path):
    no_parts = some_shards(tmp_path / "x", ["ab", "cd"])
    item = some_shards(tmp_path / "y", [["ab", "cd"]])
    for shards in (no_parts, item):
        assert "at least two documents" in get_error_message(some_batches, "pairs", shards)


# Missing spans.


def test_span_counts_match_the_published_example():
    """512 tokens, 15% in spans of 3: 26 spans. 568 tokens give 512 and 114, including the ends."""
    assert span_counts(512, 0.15, 3.0) == (77, 26)
    replaced, spans = span_counts(568, 0.15, 3.0)
    assert (568 - replaced + spans + 1, replaced + spans + 1) == (512, 114)


def test_spans_have_all_lengths_and_never_touch():
    lengths = []
    for seed in range(200):
        spans = random_spans(100, 0.15, 3.0, np.random.default_rng(seed))
        assert len(spans) == 5 and sum(end - start for start, end, _ in spans) == 15
        assert spans[0][0] > 0 and spans[-1][1:] == (100, 100)
        for (_, end, following), (start, _, _) in itertools.pairwise(spans):
            assert end < following == start
        lengths += [end - start for start, end, _ in spans]
    assert min(lengths) == 1 and max(lengths) > 7


@pytest.mark.parametrize("length", [10, 40, 41, 64])
def test_source_and_target_restore_the_text(shards, length):
    batches = some_batches("spans", shards, length=length, shuffle=False, batch_size=1)
    rows = epoch_rows(batches)
    assert rows["source"].shape[1] in (length, length - 1)
    plain = LanguageModelBatches(
        shards, length=batches.length, batch_size=1, shuffle=False, add_start=False
    )
    texts = epoch_rows(plain)["tokens"]
    for source, target, labels, text in zip(
        *(rows[k] for k in ("source", "target", "labels")), texts
    ):
        assert source[-1] == labels[-1] == END and target[0] == PAD
        np.testing.assert_array_equal(target[1:], labels[:-1])
        spans = np.split(labels[:-1], np.flatnonzero(labels[:-1] >= VOCAB))[1:]
        filled = []
        for token in source[:-1].tolist():
            filled += spans[token - VOCAB][1:].tolist() if token >= VOCAB else [token]
        assert filled == text.tolist()
        assert [span[0] for span in spans] == list(range(VOCAB, batches.vocab_size))


def test_sentinels_of_the_tokenizer_are_used(shards):
    batches = some_batches("spans", shards, sentinel_ids=range(VOCAB - 1, 20, -1), start_id=START)
    inputs, labels = batches.row(0, 0)
    assert batches.vocab_size == VOCAB and inputs["target"][0] == START
    assert labels[0] == VOCAB - 1
    assert "there are 1 `sentinel_ids`" in get_error_message(
        some_batches, "spans", shards, sentinel_ids=[1]
    )


@pytest.mark.parametrize(
    "kind, options, expected_error",
    [
        ("masked", {"rate": 0.0}, "rate=0.0"),
        ("pairs", {"length": 4}, "length must be an integer of at least 5, got 4"),
        ("pairs", {"rate": 1.5}, "rate=1.5"),
        ("pairs", {"batch_size": 10**6}, "150 documents make"),
        ("spans", {"mean_span": 0.5}, "mean_span=0.5"),
        ("spans", {"length": 3}, "length must be an integer of at least 4, got 3"),
    ],
)
def test_invalid_options_are_refused(shards, kind, options, expected_error):
    assert expected_error in get_error_message(some_batches, kind, shards, **options)
