"""Each epoch packs every pair once, rows are nearly full, and models keep sentences separate."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.datasets import TranslationBatches
from dtransformer.datasets.packing import pack, plan_packed_batches
from dtransformer.models import CausalLM, TranslationTransformer
from tests.datasets.input_errors import get_error_message

END = 3


def some_lengths(count=2000, longest=40, seed=0):
    """Return lengths [N, 2] of two sides of similar length."""
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest + 1, count)
    return np.stack([source, np.clip(source + rng.integers(-4, 5, count), 1, longest)], axis=1)


def ragged(lengths, seed=1):
    row_splits = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.random.default_rng(seed).integers(4, 1000, row_splits[-1], np.int32)
    return tf.RaggedTensor.from_row_splits(ids, row_splits)


def some_batches(count=300, longest=20, **options):
    lengths = some_lengths(count, longest)
    sides = ragged(lengths[:, 0], 1), ragged(lengths[:, 1], 2)
    options = {"packed_length": 64, "batch_size": 4, "seed": 7, **options}
    return sides, TranslationBatches(*sides, **options)


@pytest.mark.parametrize("capacity", [40, 100, 256])
def test_rows_are_nearly_full_and_within_capacity(capacity):
    lengths = some_lengths()
    lengths = lengths[np.argsort(-lengths.max(axis=1))]
    rows = pack(lengths, capacity)
    used = np.stack([np.bincount(rows, side) for side in lengths.T])
    assert used.max() <= capacity
    assert lengths.sum() / (2 * capacity * used.shape[1]) > (0.9 if capacity > 40 else 0.8)


def test_each_epoch_packs_every_pair_once_and_differently():
    lengths = some_lengths()
    plan = functools.partial(plan_packed_batches, lengths, capacity=64, batch_rows=5, seed=3)
    epochs = [plan(epoch=epoch) for epoch in range(3)]
    for batches in epochs:
        assert len(batches) == len(epochs[0])
        assert all(len(batch) == 5 for batch in batches[:-1])
        rows = [row for batch in batches for row in batch]
        assert sorted(np.concatenate(rows)) == list(range(len(lengths)))
        assert max(lengths[row].sum(axis=0).max() for row in rows) <= 64
    flat = [[pair for batch in batches for row in batch for pair in row] for batches in epochs]
    assert flat[0] != flat[1] != flat[2]
    again = plan_packed_batches(lengths, capacity=64, batch_rows=5, seed=3, epoch=1)
    assert [[list(row) for row in b] for b in again] == [[list(r) for r in b] for b in epochs[1]]


def unpacked(batch):
    """Return the (source, target, labels) of all pairs of a batch, as tuples."""
    inputs, labels = tf.nest.map_structure(lambda x: x.numpy(), batch)
    pairs = []
    for row in range(len(labels)):
        source_ids, target_ids = inputs["source_segments"][row], inputs["target_segments"][row]
        for index in range(1, source_ids.max() + 1):
            source, here = inputs["source"][row][source_ids == index], target_ids == index
            pairs.append(
                tuple(map(tuple, (source, inputs["target"][row][here], labels[row][here])))
            )
        assert (source_ids == 0).tolist() == (inputs["source"][row] == 0).tolist()
        assert (target_ids == 0).tolist() == (labels[row] == 0).tolist()
    return pairs


def test_batches_have_one_shape_and_contain_all_pairs():
    (source, target), batches = some_batches()
    result = []
    for batch in batches.as_dataset():
        assert {x.shape.as_list() == [4, 64] for x in tf.nest.flatten(batch)} == {True}
        result += unpacked(batch)
    expected = [(tuple(s), (2, *t), (*t, END)) for s, t in zip(source.to_list(), target.to_list())]
    assert sorted(result) == sorted(expected)
    assert len(batches) == sum(1 for _ in batches.as_dataset())


def test_ranks_divide_the_rows_of_one_process():
    _, alone = some_batches(batch_size=6, drop_remainder=True)
    shares = [
        some_batches(batch_size=6, drop_remainder=True, shard_index=k, num_shards=2)[1]
        for k in range(2)
    ]
    for full, *parts in zip(alone.as_dataset(), *(share.as_dataset() for share in shares)):
        assert unpacked(full) != unpacked(parts[0])
        assert sorted(unpacked(full)) == sorted([*unpacked(parts[0]), *unpacked(parts[1])])


def test_epoch_resumes_at_the_next_batch():
    _, batches = some_batches()
    full = [unpacked(batch) for batch in batches.as_dataset()]
    batches.restore(batches.position(3))
    assert [unpacked(batch) for batch in batches.as_dataset()] == full[3:]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"packed_length": 20}, "`packed_length=20` is less than the longest sentence"),
        ({"batch_tokens": 128}, "Specify either"),
        (
            {"batch_size": 1, "num_shards": 2},
            "1 rows of `packed_length=64`, which is less than the 2 data ranks",
        ),
    ],
    ids=str,
)
def test_invalid_packing_options_are_refused(options, words):
    assert words in get_error_message(some_batches, **options)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_attention_does_not_cross_sentences_of_a_row(positions):
    model = TranslationTransformer(
        1000, hidden_size=16, num_heads=2, encoder_layers=2, decoder_layers=2, positions=positions
    )
    _, batches = some_batches(count=20, longest=8, packed_length=32, batch_size=2, shuffle=False)
    inputs, _ = next(iter(batches.as_dataset()))
    logits = model(inputs)[0]
    source_ids, target_ids = inputs["source_segments"][0], inputs["target_segments"][0]
    assert source_ids.numpy().max() > 2
    for index in range(1, source_ids.numpy().max() + 1):
        alone = {
            "source": inputs["source"][0][source_ids == index][None],
            "target": inputs["target"][0][target_ids == index][None],
        }
        np.testing.assert_allclose(logits[target_ids == index], model(alone)[0], atol=2e-5)


def test_attention_does_not_cross_documents_of_a_row():
    model = CausalLM(100, hidden_size=16, num_heads=2, num_layers=2, max_length=12)
    tokens = tf.constant([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]])
    segments = tf.constant([[1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 0]])
    logits = model({"tokens": tokens, "segments": segments})
    for index in (1, 2, 3):
        alone = model(tokens[segments == index][None])
        np.testing.assert_allclose(logits[segments == index], alone[0], atol=2e-5)


def test_packing_requires_segments_of_both_sides():
    model = TranslationTransformer(
        100, hidden_size=8, num_heads=2, encoder_layers=1, decoder_layers=1
    )
    ids = tf.ones((1, 4), "int32")
    with pytest.raises(ValueError, match="'source_segments' and 'target_segments'"):
        model({"source": ids, "target": ids, "source_segments": ids})
