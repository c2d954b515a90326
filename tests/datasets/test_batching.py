"""Each epoch contains every pair once, ranks share one plan, and epochs can be resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.datasets import (
    LengthBuckets,
    TranslationBatches,
    plan_batches,
)
from dtransformer.datasets.batch_plan import length_buckets
from tests.datasets.input_errors import get_error_message

PAD, START, END = 0, 2, 3


def some_lengths(count=1000, longest=40, seed=0):
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def some_ids(lengths, seed=1):
    """Return ragged ids. The first token of sentence i is 10 + i."""
    row_splits = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(seed).integers(4, 10, row_splits[-1], np.int32)
    ids[row_splits[:-1]] = 10 + np.arange(len(lengths))
    return tf.RaggedTensor.from_row_splits(ids, row_splits)


def some_batches(count=200, **options):
    lengths = some_lengths(count, 12), some_lengths(count, 12, seed=5)
    options = {"batch_size": 16, "buckets": 3, "seed": 7, **options}
    return TranslationBatches(*(some_ids(n) for n in lengths), **options)


def as_lists(dataset):
    return [tf.nest.map_structure(lambda x: x.numpy().tolist(), batch) for batch in dataset]


# Plans.

PLANS = [
    {"batch_size": 32},
    {"batch_size": 7, "buckets": 1},
    {"batch_size": 1000},
    {"batch_size": 5000},
    {"batch_size": 64, "buckets": [5, 10, 80]},
    {"batch_tokens": 400},
    {"batch_tokens": 40, "buckets": 3},
    {"batch_tokens": 100_000},
    {"batch_tokens": 400, "shuffle": False},
]


@pytest.mark.parametrize("options", PLANS)
def test_every_sentence_is_in_one_batch_within_the_limit(options):
    lengths = some_lengths()
    for epoch in range(3):
        plan = plan_batches(lengths, epoch=epoch, **options)
        assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
        for batch in plan:
            assert 0 < len(batch) <= options.get("batch_size", len(lengths))
            tokens = len(batch) * lengths[batch].max()
            assert tokens <= options.get("batch_tokens", tokens)


@pytest.mark.parametrize("options", PLANS)
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_number_of_batches_is_equal_for_every_epoch_and_seed(options, drop_remainder):
    lengths = some_lengths()
    plans = [
        plan_batches(lengths, epoch=epoch, seed=seed, drop_remainder=drop_remainder, **options)
        for epoch in range(5)
        for seed in range(3)
    ]
    assert len({len(plan) for plan in plans}) == 1
    sizes = {tuple(sorted(map(len, plan))) for plan in plans}
    assert len(sizes) == 1


def test_plan_depends_only_on_seed_and_epoch():
    lengths = some_lengths()

    def plan(**options):
        return [batch.tolist() for batch in plan_batches(lengths, batch_size=32, **options)]

    assert plan(seed=1, epoch=2) == plan(seed=1, epoch=2)
    different = [plan(), plan(seed=1), plan(epoch=1), plan(shuffle=False)]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert plan(shuffle=False, epoch=3) == plan(shuffle=False)


@pytest.mark.parametrize(
    "count, sizes",
    [
        (96, [32, 32, 32]),
        (120, [32, 32, 32, 24]),  # A remainder of at least half a batch is a separate batch.
        (100, [32, 32, 18, 18]),  # A smaller remainder is divided with the batch before.
        (5, [5]),
    ],
)
def test_remainder_is_a_batch_or_is_divided_with_the_last_batch(count, sizes):
    options = {"batch_size": 32, "shuffle": False, "buckets": 1}
    assert [len(batch) for batch in plan_batches(np.ones(count), **options)] == sizes
    dropped = plan_batches(np.ones(count), drop_remainder=True, **options)
    assert [len(batch) for batch in dropped] == [32] * (count // 32)


def test_buckets_save_padding():
    lengths = some_lengths(5000)

    def padding(buckets):
        plan = plan_batches(lengths, batch_size=32, buckets=buckets)
        return sum(len(batch) * lengths[batch].max() for batch in plan) / lengths.sum() - 1

    assert padding(1) > 0.8
    assert padding(8) < 0.2
    assert length_buckets(np.array([3, 3, 3, 9]), 4).tolist() == [3, 9]


def test_plan_without_sentences_is_empty():
    assert plan_batches([], batch_size=4) == []


@pytest.mark.parametrize(
    "options, expected_error",
    [
        ({}, "Specify either"),
        ({"batch_size": 8, "batch_tokens": 80}, "Specify either"),
        ({"batch_size": 3, "min_rows": 4}, "4 data ranks"),
        ({"batch_tokens": 159, "min_rows": 4}, "at least 160"),
        ({"batch_size": 8, "buckets": 0}, "buckets"),
        ({"batch_size": 8, "buckets": [20, 10, 40]}, "increasing"),
        ({"batch_size": 8, "buckets": [10, 20]}, "40 tokens"),
    ],
)
def test_invalid_plan_options_are_refused(options, expected_error):
    assert expected_error in get_error_message(plan_batches, some_lengths(), **options)


# Batches.


def test_structure_of_a_batch():
    ids = tf.ragged.constant([[5, 6, 7], [8]], tf.int32)
    batches = TranslationBatches(ids, ids[::-1], batch_size=2, buckets=1, shuffle=False)
    dataset = batches.as_dataset()
    inputs, labels = as_lists(dataset)[0]
    assert inputs["source"] == [[5, 6, 7], [8, PAD, PAD]]
    assert inputs["target"] == [[START, 8, PAD, PAD], [START, 5, 6, 7]]
    assert labels == [[8, END, PAD, PAD], [5, 6, 7, END]]
    spec = tf.TensorSpec([None, None], tf.int32)
    assert dataset.element_spec == ({"source": spec, "target": spec}, spec)
    assert dataset.cardinality() == len(batches) == 1


def test_accepts_arrays_and_pads_to_multiples():
    ids = tf.ragged.constant([[5, 6, 7], [8]], tf.int32)
    buckets = LengthBuckets(1, pad_to_multiple_of=4)
    flat = ids.flat_values.numpy(), ids.row_splits.numpy()
    options = {"batch_size": 2, "buckets": buckets, "shuffle": False}
    inputs, labels = as_lists(TranslationBatches(flat, flat, **options).as_dataset())[0]
    assert inputs["source"] == [[5, 6, 7, PAD], [8, PAD, PAD, PAD]]
    assert labels == [[5, 6, 7, END], [8, END, PAD, PAD]]


@pytest.mark.parametrize("size", [{"batch_size": 16}, {"batch_tokens": 100, "batch_size": None}])
def test_epoch_contains_every_pair_once(size):
    batches = some_batches(**size)
    dataset = batches.as_dataset()
    seen = []
    for inputs, labels in dataset:
        sentences = inputs["source"][:, 0].numpy() - 10
        assert (inputs["target"][:, 1].numpy() - 10 == sentences).all()
        text = tf.where(labels == END, PAD, labels)
        assert (inputs["target"][:, 1:] == text[:, :-1]).numpy().all()
        if "batch_tokens" in size:
            assert max(tf.size(inputs["source"]), tf.size(labels)) <= 100
        seen += sentences.tolist()
    assert sorted(seen) == list(range(200))


def test_each_epoch_has_a_different_order_in_keras_fit():
    batches = some_batches()
    dataset = batches.as_dataset()
    epochs = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        epochs.append(as_lists(dataset))
    assert len({len(epoch) for epoch in epochs}) == 1
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.parametrize("num_shards", [2, 3, 5])
@pytest.mark.parametrize("size", [{}, {"batch_size": None, "batch_tokens": 150}])
def test_ranks_divide_the_batches_of_one_process(num_shards, size):
    unsharded = some_batches(**size)
    shards = [some_batches(**size, shard_index=i, num_shards=num_shards) for i in range(num_shards)]
    assert {len(shard) for shard in shards} == {len(unsharded)}
    for epoch in range(2):
        for index in range(len(unsharded)):
            shares = [shard.rows(epoch, index) for shard in shards]
            assert all(len(share) for share in shares)
            everything = np.concatenate(unsharded.rows(epoch, index))
            assert sorted(np.concatenate(sum(shares, []))) == sorted(everything)


def test_rank_reads_its_planned_rows():
    batches = some_batches(shard_index=1, num_shards=2)
    for index, (inputs, _) in enumerate(batches.as_dataset()):
        planned = np.concatenate(batches.rows(0, index))
        assert (inputs["source"][:, 0].numpy() - 10 == planned).all()


@pytest.mark.parametrize("training", [True, False])
def test_long_pairs_are_left_out_in_training_and_cut_off_otherwise(training):
    source = tf.ragged.constant([[4], [4] * 5, [4] * 3, [4], []], tf.int32)
    target = tf.ragged.constant([[5], [5], [5] * 4, [], [5]], tf.int32)
    options = {"batch_size": 9, "buckets": 1, "max_length": 3, "shuffle": False}
    batches = TranslationBatches(source, target, training=training, **options)
    inputs, labels = as_lists(batches.as_dataset())[0]
    if training:
        assert (batches.num_pairs, batches.num_skipped) == (1, 4)
        assert labels == [[5, END]]
    else:
        assert (batches.num_pairs, batches.num_skipped) == (3, 2)
        assert inputs["source"] == [[4, 0, 0], [4, 4, 4], [4, 4, 4]]
        assert labels == [[5, END, 0, 0], [5, END, 0, 0], [5, 5, 5, END]]


@pytest.mark.parametrize("done, shard", [(0, {}), (5, {"shard_index": 1, "num_shards": 2})])
def test_epoch_resumes_at_the_next_batch(done, shard):
    first = some_batches(**shard)
    first.set_epoch(3)
    remaining = as_lists(first.as_dataset())[done:]
    position = first.position(done)

    second = some_batches(**shard)
    second.restore(position)
    second.set_epoch(3)  # `Trainer.fit` does this when it starts with this epoch.
    dataset = second.as_dataset()
    assert as_lists(dataset) == remaining
    for batches in (first, second):
        batches.set_epoch(4)  # The next epoch is complete.
    assert as_lists(dataset) == as_lists(first.as_dataset())


def test_position_of_the_next_batch_and_invalid_restore():
    batches = some_batches()
    assert batches.position() == {"epoch": 0, "batch": 0, "num_batches": len(batches), "seed": 7}
    batches.set_epoch(2, start=3)
    assert batches.position(2)["batch"] == 5
    end = batches.position(len(batches) - 3)
    assert (end["epoch"], end["batch"]) == (3, 0)
    assert "num_batches" in get_error_message(some_batches(batch_size=8).restore, end)
    assert "seed" in get_error_message(some_batches(seed=8).restore, end)
    assert "does not exist" in get_error_message(batches.set_epoch, 1, start=len(batches) + 1)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit_runs_all_epochs_and_resumes_from_a_position():
    seen = []

    class Reader(keras.Model):
        def train_step(self, data):
            seen[-1].append((data[0]["source"][:, 0].numpy() - 10).tolist())
            return {"loss": 0.0}

    class NextEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append([])
            batches.set_epoch(epoch)

    def fit(**options):
        seen.clear()
        model = Reader()
        model.compile(run_eagerly=True)
        model.fit(dataset, epochs=3, shuffle=False, callbacks=[NextEpoch()], verbose=0, **options)
        return list(seen)

    batches = some_batches()
    dataset = batches.as_dataset()
    epochs = fit()
    assert [len(epoch) for epoch in epochs] == [len(batches)] * 3
    batches.restore({"epoch": 1, "batch": 4})
    assert fit(initial_epoch=1) == [epochs[1][4:], epochs[2]]


@pytest.mark.parametrize(
    "options, expected_error",
    [
        ({"batch_size": None}, "Specify either"),
        ({"batch_size": 16, "batch_tokens": 100}, "Specify either"),
        ({"num_shards": 17}, "17 data ranks"),
        ({"shard_index": 2, "num_shards": 2}, "shard_index=2"),
        ({"max_length": 0}, "max_length must be an integer"),
        ({"count": 3, "num_shards": 4}, "do not fill a batch"),
    ],
)
def test_invalid_options_are_refused(options, expected_error):
    assert expected_error in get_error_message(some_batches, **options)


def test_invalid_multiple_is_refused():
    message = get_error_message(LengthBuckets, pad_to_multiple_of=0)
    assert "pad_to_multiple_of must be an integer" in message


def test_sides_of_different_length_are_refused():
    ids = some_ids([3, 4, 5])
    assert "3 source" in get_error_message(TranslationBatches, ids, ids[:2], batch_size=2)
    message = get_error_message(TranslationBatches, ids, ids, batch_size=2, max_length=2)
    assert "max_length=2" in message


def test_padding_to_buckets_limits_the_number_of_shapes():
    rng = np.random.default_rng(0)
    rows = lambda: tf.ragged.constant([[5] * n for n in rng.integers(1, 21, 200)], "int32")
    buckets = LengthBuckets([7, 14, 21], pad_to_bounds=True)
    batches = TranslationBatches(rows(), rows(), batch_size=10, max_length=20, buckets=buckets)
    shapes = set()
    for inputs, labels in batches.as_dataset():
        assert inputs["target"].shape == labels.shape
        shapes.add((inputs["source"].shape[1], labels.shape[1]))
    assert shapes == {(7, 7), (14, 14), (20, 21)}, "a source has no start token"
