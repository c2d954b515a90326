"""Mixtures of token shards have exact shares, and the same rows on every number of ranks."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtransformer.datasets import (
    LanguageModelBatches,
    MaskedLanguageModelBatches,
    MixedBatches,
    NextSentenceBatches,
    ShardMixture,
    SpanCorruptionBatches,
    TokenShards,
)
from dtransformer.datasets.mixture import MixtureOrder
from tests.datasets.input_errors import get_error_message
from tests.datasets.small_shards import Letters, some_shards

WEIGHTS = [0.6, 0.3, 0.1]
WEIGHT = st.decimals("0.01", "100", places=2).map(float)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three folders of different sizes."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        some_shards(folder / name, count=count, seed=count)
        for name, count in (("web", 60), ("code", 25), ("books", 12))
    ]


def mixed(sources, **options):
    options = {"length": 16, "batch_size": 4, "seed": 5, **options}
    return MixedBatches(LanguageModelBatches, ShardMixture(sources, WEIGHTS), **options)


def tokens(batches, epoch, batch):
    return batches.batch(epoch, batch)[0]["tokens"]


@settings(max_examples=30, deadline=None)
@given(st.lists(WEIGHT, min_size=1, max_size=5), st.integers(0, 10**9))
def test_every_prefix_has_the_shares_of_the_weights(weights, first):
    order = MixtureOrder(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    counts = order.counts(first).tolist()
    for row in range(first, first + 100):
        source, turn = order.place(row)
        assert turn == counts[source]
        counts[source] += 1
        errors = [n - (row + 1) * share for n, share in zip(counts, shares)]
        assert max(map(abs, errors)) < 1


def test_order_of_three_sources():
    order = MixtureOrder([6, 3, 1])
    assert "".join("ABC"[order.place(row)[0]] for row in range(20)) == 2 * "AABABAABAC"
    assert order.counts(1000).tolist() == [600, 300, 100]
    assert MixtureOrder([0.1, 0.2]).counts(3 * 10**9).tolist() == [10**9, 2 * 10**9]


def test_weights_with_too_many_digits_are_refused():
    message = get_error_message(lambda: MixtureOrder([123456789, 987654321]))
    assert "Round the weights" in message


def test_each_source_is_used_completely_in_each_of_its_epochs(sources):
    batches = mixed(sources)
    order = MixtureOrder(WEIGHTS)
    rows = {}
    for row in range(6 * batches.num_rows):
        epoch, index = divmod(row, batches.num_rows)
        inputs, _ = batches.row(epoch, index)
        source, _ = order.place(row)
        rows.setdefault(source, []).append(inputs["tokens"].tolist())
    for source, source_rows in rows.items():
        expected = batches.sources[source]
        num_rows = expected.num_rows
        epochs = len(source_rows) // num_rows
        assert epochs >= 2
        for epoch in range(epochs):
            result = source_rows[epoch * num_rows : (epoch + 1) * num_rows]
            all_rows = [expected.row(epoch, i)[0]["tokens"].tolist() for i in range(num_rows)]
            assert sorted(result) == sorted(all_rows)
            assert result != all_rows  # The source is shuffled.


def test_epochs_of_sources_follow_from_the_number_of_batches(sources):
    batches = mixed(sources)
    num_batches = 7 * len(batches)
    epochs = batches.source_epochs(num_batches)
    assert list(epochs) == [str(shards.folder) for shards in sources]
    for value, weight, source in zip(epochs.values(), WEIGHTS, batches.sources):
        assert abs(value - num_batches * 4 * weight / source.num_rows) < 1 / source.num_rows


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_divide_the_same_batches(sources, num_ranks):
    batches = mixed(sources, batch_size=6)
    ranks = [
        mixed(sources, batch_size=6, shard_index=i, num_shards=num_ranks) for i in range(num_ranks)
    ]
    for epoch, batch in ((0, 0), (0, len(batches) - 1), (2, 1)):
        expected = tokens(batches, epoch, batch)
        for index, rank in enumerate(ranks):
            np.testing.assert_array_equal(tokens(rank, epoch, batch), expected[index::num_ranks])


def test_resumed_run_reads_the_rows_of_a_straight_run(sources):
    straight = mixed(sources)
    expected = []
    for epoch in range(3):
        straight.set_epoch(epoch, 0)
        expected += [inputs["tokens"] for inputs, _ in straight.as_dataset().as_numpy_iterator()]
    straight.set_epoch(0, 0)
    done = len(straight) + 3
    position = straight.position(done)
    halves = []
    for index in range(2):  # The run resumes on two ranks.
        half = mixed(sources, shard_index=index, num_shards=2)
        half.restore(position)
        rows = [inputs["tokens"] for inputs, _ in half.as_dataset().as_numpy_iterator()]
        half.set_epoch(2)
        rows += [inputs["tokens"] for inputs, _ in half.as_dataset().as_numpy_iterator()]
        halves.append(rows)
    assert len(halves[0]) == len(expected) - done
    for batch, first, second in zip(expected[done:], *halves, strict=True):
        np.testing.assert_array_equal(batch[0::2], first)
        np.testing.assert_array_equal(batch[1::2], second)


def test_position_of_other_weights_is_refused(sources):
    position = mixed(sources).position()
    other = MixedBatches(
        LanguageModelBatches,
        ShardMixture(sources, [0.5, 0.3, 0.2]),
        length=16,
        batch_size=4,
        seed=5,
    )
    assert "The saved position has `data=" in get_error_message(lambda: other.restore(position))


@pytest.mark.parametrize(
    "kind", [MaskedLanguageModelBatches, SpanCorruptionBatches, NextSentenceBatches]
)
def test_all_kinds_of_rows_can_be_mixed(kind, tmp_path):
    shards = [
        some_shards(tmp_path / name, count=30, seed=seed, parts=3)
        for seed, name in enumerate(("web", "code"))
    ]
    mixture = ShardMixture(shards, [3, 1])
    batches = MixedBatches(kind, mixture, length=24, batch_size=4, pad_rows_to_multiple_of=3)
    inputs, _ = batches.batch(1, 2)
    empty_inputs, _ = batches.empty_row()
    for name, value in inputs.items():
        assert value.shape == (6, *empty_inputs[name].shape)
        np.testing.assert_array_equal(value[4:], [empty_inputs[name]] * 2)
    order = [MixtureOrder([3, 1]).place(batches.num_rows + 8 + i) for i in range(4)]
    source, turn = order[0]
    epoch, place = divmod(turn, batches.sources[source].num_rows)
    (expected, _) = batches.sources[source].batch(epoch, place)
    for name, value in expected.items():
        np.testing.assert_array_equal(inputs[name][0], value[0])


def test_sources_with_different_tokenizers_are_refused(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(Letters, "vocab_size", 40)
    other = some_shards(tmp_path / "other")
    message = get_error_message(lambda: ShardMixture([sources[0], other], [1, 1]))
    assert "another tokenizer, vocabulary or id type" in message and "--tokenizer" in message
    monkeypatch.setattr(Letters, "vocab_size", 30)
    monkeypatch.setattr(Letters, "end_id", 1)
    other = some_shards(tmp_path / "other_ids")
    message = get_error_message(lambda: ShardMixture([sources[0], other], [1, 1]))
    assert "another tokenizer, vocabulary or id type" in message


@pytest.mark.parametrize(
    "weights, text", [([1, 0], "one positive weight"), ([1], "one positive weight")]
)
def test_wrong_weights_are_refused(sources, weights, text):
    assert text in get_error_message(lambda: ShardMixture(sources[:2], weights))


def test_repeated_folder_is_refused(sources):
    again = TokenShards(sources[0].folder)
    message = get_error_message(lambda: ShardMixture([sources[0], again], [1, 1]))
    assert "is listed twice" in message
