"""Each epoch counts every token once, in one order for all ranks, and resumes anywhere."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.datasets import LanguageModelBatches
from dtransformer.datasets.language_model import TokenStream
from dtransformer.datasets.mixture import permuted
from tests.datasets.input_errors import get_error_message
from tests.datasets.small_shards import END, PAD, START, some_documents, some_shards

LENGTH, IGNORED = 16, -100


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return some_shards(tmp_path_factory.mktemp("shards") / "x", some_documents(60, 40))


def some_batches(shards, **options):
    return LanguageModelBatches(shards, **{"length": LENGTH, "batch_size": 6, "seed": 7, **options})


def read(batches):
    """Return tokens, segments and labels of the remaining batches, [batches, 3, b, s]."""
    return [
        np.stack([inputs["tokens"], inputs["segments"], labels])
        for inputs, labels in batches.as_dataset().as_numpy_iterator()
    ]


def circle(shards, start=START, end=END):
    """Return the tokens of the stream and the document index of each token, computed one by one."""
    documents = [[i for i in (start, *ids, end) if i is not None] for ids in shards]
    numbers = np.repeat(np.arange(len(documents)), [len(ids) for ids in documents])
    return np.concatenate(documents), numbers


# Token stream.


@pytest.mark.parametrize("start", [START, None])
@pytest.mark.parametrize("end", [END, None])
def test_stream_can_be_read_at_any_position(shards, start, end):
    stream, (ids, numbers) = TokenStream(shards, start, end), circle(shards, start, end)
    assert stream.length == len(ids)
    rng = np.random.default_rng(0)
    for count in (1, 2, 30, 500, 3 * len(ids)):
        for first in (0, len(ids) - 1, *rng.integers(len(ids), size=20).tolist()):
            result, of = stream.read(first, count)
            places = np.arange(first, first + count) % len(ids)
            np.testing.assert_array_equal(result, ids[places])
            is_new = (np.diff(numbers[places]) != 0) | (places[1:] == 0)
            np.testing.assert_array_equal(of, 1 + np.cumsum([0, *is_new]))


# Permutations.


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000])
def test_permutation_contains_every_index_once(size):
    order = permuted(np.arange(size), size, [1, 2])
    assert sorted(order) == list(range(size))
    some = np.arange(size)[::-3]
    np.testing.assert_array_equal(permuted(some, size, [1, 2]), order[some])


def test_permutations_of_epochs_do_not_correlate():
    size, count = 4000, 30
    orders = np.array([permuted(np.arange(size), size, [3, epoch]) for epoch in range(count)])
    correlations = np.corrcoef([np.arange(size), *orders])[np.triu_indices(count + 1, 1)]
    assert np.abs(correlations).max() < 5 / size**0.5
    assert 0.8 < correlations.std() * size**0.5 < 1.2
    assert np.abs(np.mean(orders == np.arange(size)) * size - 1) < 1


def test_small_permutations_are_uniform():
    orders = [tuple(permuted(np.arange(4), 4, [seed])) for seed in range(4800)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24 and counts.min() > 120 and counts.max() < 300


def test_permutation_larger_than_memory():
    some = permuted(np.arange(1000), 10**15, [0])
    assert len(set(some)) == 1000 and 0 <= some.min() and some.max() < 10**15


# Batches.


def test_structure_of_a_batch(tmp_path):
    shards = some_shards(tmp_path / "x", ["ab", "cdefgh"])
    batches = some_batches(shards, length=6, batch_size=3, training=False)
    ((tokens, segments, labels),) = read(batches)
    a, b, c, d, e, f, g, h = range(4, 12)
    assert tokens.tolist() == [
        [START, a, b, END, START, c],
        [d, e, f, g, h, END],
        [PAD] * 6,
    ]
    assert segments.tolist() == [[1, 1, 1, 1, 2, 2], [1] * 6, [0] * 6]
    no = IGNORED
    assert labels.tolist() == [[a, b, END, no, c, d], [e, f, g, h, END, no], [no] * 6]
    spec, of_labels = batches.as_dataset().element_spec
    assert of_labels.shape == spec["tokens"].shape == spec["segments"].shape == (3, 6)
    assert {of_labels.dtype, spec["tokens"].dtype, spec["segments"].dtype} == {tf.int32}


def test_evaluation_counts_each_token_except_the_first_of_a_document(shards):
    batches = some_batches(shards, training=False)
    rows = np.concatenate(read(batches), axis=1)
    result = rows[2][rows[2] != IGNORED]
    expected = np.concatenate([[*ids, END] for ids in shards])
    np.testing.assert_array_equal(result, expected)
    assert (rows[2][rows[1] == 0] == IGNORED).all()
    assert np.array_equal(read(batches), read(some_batches(shards, training=False, seed=8)))


def test_epoch_trains_on_each_token_once(shards):
    ids, _ = circle(shards)
    batches = some_batches(shards, batch_size=1)
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        rows = np.concatenate(read(batches), axis=1)
        counts, all_counts = np.bincount(rows[0].ravel(), minlength=30), np.bincount(ids)
        all_counts = np.pad(all_counts, (0, 30 - len(all_counts)))
        assert (counts <= all_counts).all() and counts.sum() == len(ids) // LENGTH * LENGTH
        assert (rows[1] > 0).all()
        # A label is the next token of the same document. The last token of a document has none.
        same = rows[1][:, 1:] == rows[1][:, :-1]
        np.testing.assert_array_equal(rows[2][:, :-1][same], rows[0][:, 1:][same])
        assert (rows[2][:, :-1][~same] == IGNORED).all()
        assert (rows[0][:, :-1][~same] == END).all() and (rows[0][:, 1:][~same] == START).all()


def test_each_epoch_has_different_rows(shards):
    batches, epochs = some_batches(shards), []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        epochs.append(read(batches))
    assert len(epochs[0]) == len(batches) == batches.num_rows // 6
    assert np.array_equal(epochs[0], epochs[2])
    sets = [{row.tobytes() for row in np.concatenate(epoch, axis=1)[0]} for epoch in epochs]
    assert len(sets[0] & sets[1]) < 3
    assert not np.array_equal(epochs[0], read(some_batches(shards, seed=8)))


@pytest.mark.parametrize("num_shards, multiple", [(2, 1), (3, 2), (4, 1), (5, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_ranks_divide_the_batches_of_one_process(shards, num_shards, multiple, training):
    of_all = read(some_batches(shards, training=training))
    of_ranks = [
        read(
            some_batches(
                shards,
                training=training,
                shard_index=index,
                num_shards=num_shards,
                pad_rows_to_multiple_of=multiple,
            )
        )
        for index in range(num_shards)
    ]
    for position, full in enumerate(of_all):
        for index in range(num_shards):
            local = of_ranks[index][position]
            assert local.shape[1] % multiple == 0
            expected = full[:, index::num_shards]
            np.testing.assert_array_equal(local[:, : expected.shape[1]], expected)
            assert (local[2, expected.shape[1] :] == IGNORED).all()


def test_epoch_resumes_at_the_next_batch(shards):
    first = some_batches(shards)
    first.set_epoch(2)
    remaining, position = read(first)[3:], first.position(3)
    second = some_batches(shards)
    second.restore(position)
    second.set_epoch(2)
    assert np.array_equal(read(second), remaining)
    first.set_epoch(3)
    second.set_epoch(3)
    assert np.array_equal(read(first), read(second))


def test_position_of_different_data_is_refused(shards, tmp_path):
    position = some_batches(shards).position(2)
    others = some_shards(tmp_path / "x", some_documents(60, 40, seed=1))
    for batches, name in (
        (some_batches(others), "data"),
        (some_batches(shards, length=8, batch_size=12), "length"),
        (some_batches(shards, seed=8), "seed"),
    ):
        assert name in get_error_message(batches.restore, position)


@pytest.mark.parametrize(
    "options, expected_error",
    [
        ({"length": 0}, "length must be an integer of at least 1, got 0"),
        ({"batch_size": 1000}, "do not fill a batch of 1000"),
        ({"batch_size": 2, "num_shards": 3}, "3 data ranks"),
        ({"shard_index": 2, "num_shards": 2}, "shard_index=2"),
        ({"pad_rows_to_multiple_of": 0}, "pad_rows_to_multiple_of must be"),
    ],
)
def test_invalid_options_are_refused(shards, options, expected_error):
    assert expected_error in get_error_message(some_batches, shards, **options)
