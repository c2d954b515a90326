"""Promise: flat slices put a tensor together again, and nothing but zeros pads them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.process_groups import Group

SHAPES = [(), (1,), (7,), (8,), (3, 5), (2, 3, 4)]


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_of_all_ranks_are_the_whole(shape, num_slices):
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    rows = flat_shards.to_shards(tf.constant(x), num_slices)
    size = flat_shards.shard_size(math.prod(shape), num_slices)
    assert rows.shape == (num_slices, size)
    np.testing.assert_array_equal(flat_shards.from_shards(rows, shape), x)
    assert np.abs(rows).sum() == pytest.approx(np.abs(x).sum(), 1e-5), "padded with zeros"
    for index in range(num_slices):
        group = Group(tuple(range(num_slices)), index)
        np.testing.assert_array_equal(flat_shards.own_shard(tf.constant(x), group), rows[index])


def test_slices_are_as_small_as_can_be():
    sizes = [flat_shards.shard_size(n, d) for n, d in ((12, 4), (13, 4), (1, 4), (0, 4), (9, 1))]
    assert sizes == [3, 4, 1, 0, 9]


def test_a_group_of_one_has_everything():
    tensors = [tf.range(6.0), tf.ones([2, 2])]
    alone = Group((0,), 0)
    parts = flat_shards.reduce_scatter(tensors, alone, "sums")
    whole = flat_shards.all_gather(parts, [(6,), (2, 2)], alone, "wholes")
    for found, expected in zip(whole, tensors, strict=True):
        np.testing.assert_array_equal(found, expected)
