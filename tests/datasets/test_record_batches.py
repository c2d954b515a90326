"""Mixtures are exact at every prefix, and batches of records are determined by their index."""

import numpy as np
import pytest

from dtransformer.datasets.mixture import mixed_records, mixture_order
from dtransformer.datasets.record_batches import EncodedRecords, RecordBatches, next_tokens
from dtransformer.errors import InputError

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(3, 12, 40)


def records(lengths=LENGTHS):
    """Return records whose tokens identify them. The first token of each has no label."""
    rows = []
    for index, length in enumerate(lengths):
        ids = np.full(length, index + 1)
        rows.append([(ids, np.where(np.arange(length) > 0, ids, -100))])
    return EncodedRecords(rows)


def batches(encoded=None, **options):
    options = {"length": 16, "batch_size": 4, "seed": 3, **options}
    return RecordBatches(encoded or records(), next_tokens, **options)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.5, 0.3, 0.15, 0.05), (5, 1, 0.1)])
@pytest.mark.parametrize("mode", ("once", "repeat", "first_ends"))
def test_mixture_follows_the_weights_at_every_prefix(mode, weights):
    sizes = [round(400 * w / sum(weights)) + 3 for w in weights]
    order = mixture_order(sizes, weights, mode)
    counts = np.cumsum(order[:, None] == np.arange(len(sizes)), axis=0)
    places = np.arange(1, len(order) + 1)[:, None]
    first_end = len(order)
    if mode == "once":  # Until one source is exhausted.
        first_end = min(np.flatnonzero(order == j)[-1] for j in range(len(sizes)))
        assert counts[-1].tolist() == sizes
    error = np.abs(counts - places * np.array(weights) / sum(weights))[: first_end + 1]
    assert error.max() < 1
    if mode == "repeat":
        assert (counts[-1] >= sizes).all()
    if mode == "first_ends":
        assert (counts[-1] <= np.array(sizes) + 1).all() and len(order) > 300


def test_each_source_is_shuffled_and_used_completely():
    order = mixture_order([5, 50], [0.5, 0.5], "repeat")
    result = mixed_records(order, [5, 50], [0, 0])
    first = result[order == 0]
    for start in range(0, len(first) - 4, 5):  # Each repetition contains all records.
        assert sorted(first[start : start + 5]) == [0, 1, 2, 3, 4]
    assert first[:5].tolist() != first[5:10].tolist()
    assert sorted(result[order == 1][:50]) == list(range(5, 55))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weights", [None, (0.7, 0.3)])
def test_ranks_divide_batches_and_resume_anywhere(packed, weights):
    options = {"packed": packed, "weights": weights, "sizes": [25, 15]}
    item = batches(**options)
    halves = [batches(**options, shard_index=i, num_shards=2) for i in range(2)]
    for epoch in (0, 1):
        for batch in range(len(item)):
            inputs, labels = item.batch(epoch, batch)
            for index, half in enumerate(halves):
                local_inputs, local_labels = half.batch(epoch, batch)
                np.testing.assert_array_equal(local_inputs["tokens"], inputs["tokens"][index::2])
                np.testing.assert_array_equal(local_labels, labels[index::2])
    again = batches(**options)
    again.restore({**item.position(), "epoch": 1, "batch": 2})
    inputs, _ = next(iter(again.as_dataset()))
    np.testing.assert_array_equal(inputs["tokens"], item.batch(1, 2)[0]["tokens"])


def test_epoch_contains_each_record_once():
    for packed in (False, True):
        epochs = batches(packed=packed, batch_size=1)
        for epoch in (0, 1):
            seen = np.concatenate(
                [epochs.batch(epoch, n)[0]["tokens"][0] for n in range(len(epochs))]
            )
            counts = np.bincount(seen, minlength=41)[1:]
            assert counts.tolist() == LENGTHS.tolist()
        assert not np.array_equal(epochs.batch(0, 0)[0]["tokens"], epochs.batch(1, 0)[0]["tokens"])
    assert len(batches(packed=True, batch_size=1)) < len(batches(batch_size=1)) / 1.7


def test_labels_are_the_next_tokens_of_the_same_record():
    inputs, labels = batches(packed=True, batch_size=1).batch(0, 0)
    tokens, segments, labels = inputs["tokens"][0], inputs["segments"][0], labels[0]
    for place in range(15):
        same = segments[place] == segments[place + 1] > 0
        assert labels[place] == (tokens[place + 1] if same else -100)
    assert labels[-1] == -100


def test_position_of_changed_data_is_refused():
    position = batches().position()
    with pytest.raises(InputError, match="The saved position has `data="):
        batches(records(LENGTHS + 1)).restore(position)


def test_small_sources_do_not_disturb_the_order():
    order = mixture_order([21, 24, 45, 116], [1, 0.3, 3, 0.1], "once")
    assert np.bincount(order).tolist() == [21, 24, 45, 116]
    assert not (order[:15] == 0).all() and len(set(order[:30])) > 2
