"""Each expert accepts the first tokens up to its capacity."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer import MoEConfig
from dtransformer.parallel.expert_parallel.capacity_slots import capacity, places


@pytest.mark.parametrize(
    "tokens, fields, expected",
    [
        (16, {"expert_num": 4, "capacity_factor": 1.0}, 4),
        (16, {"expert_num": 4, "capacity_factor": 1.25, "num_experts_chosen": 2}, 10),
        (10, {"expert_num": 10, "capacity_factor": 1.1}, 2),
        (10, {"expert_num": 1, "capacity_factor": 1.1}, 11),  # Rounding must not give 12.
        (3, {"expert_num": 64, "capacity_factor": 1.0}, 1),
        (16, {"expert_num": 4, "dropless": True}, None),
    ],
)
def test_capacity_matches_expected_values(tokens, fields, expected):
    config = MoEConfig(**fields)
    assert capacity(tokens, config) == expected
    assert expected is None or int(capacity(tf.constant(tokens), config)) == expected


def test_first_tokens_get_the_capacity_slots():
    chosen = np.array([[[1, 0], [1, 1], [0, 1], [1, 0], [1, 1]]], "int64")
    slots = places(tf.constant(chosen), max_tokens=2)
    assert slots.accepted.numpy()[0].tolist() == [[1, 0], [1, 1], [0, 1], [0, 0], [0, 0]]
    assert slots.position.numpy()[0, :2].tolist() == [[0, 0], [1, 0]]


def test_shards_of_a_group_fill_the_same_slots_as_the_full_group():
    rng = np.random.default_rng(0)
    chosen = (rng.random((1, 24, 5)) < 0.4).astype("int64")
    expected = places(tf.constant(chosen), max_tokens=4).accepted.numpy()[0]
    parts = chosen.reshape(4, 6, 5)
    counts = parts.sum(axis=1)
    before = np.cumsum(counts, axis=0) - counts
    slots = places(tf.constant(parts), 4, tf.constant(before, "int64"))
    np.testing.assert_array_equal(slots.accepted.numpy().reshape(24, 5), expected)
    assert expected.sum() < chosen.sum(), "the case must drop tokens"
