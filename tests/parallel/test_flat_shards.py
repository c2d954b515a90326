"""Promise: flat shards put a tensor together again, and nothing but zeros pads them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.process_groups import Group

SHAPES = [(), (1,), (7,), (8,), (3, 5), (2, 3, 4)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shards_of_all_ranks_make_the_tensor(shape, num_shards):
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    shards = flat_shards.to_shards(tf.constant(x), num_shards)
    size = flat_shards.shard_size(math.prod(shape), num_shards)
    assert shards.shape == (num_shards, size)
    np.testing.assert_array_equal(flat_shards.from_shards(shards, shape), x)
    assert np.abs(shards).sum() == pytest.approx(np.abs(x).sum(), 1e-5), "padded with zeros"
    for index in range(num_shards):
        group = Group(tuple(range(num_shards)), index)
        np.testing.assert_array_equal(flat_shards.own_shard(tf.constant(x), group), shards[index])


def test_shards_are_as_small_as_can_be():
    sizes = [flat_shards.shard_size(n, d) for n, d in ((12, 4), (13, 4), (1, 4), (0, 4), (9, 1))]
    assert sizes == [3, 4, 1, 0, 9]


def test_a_group_of_one_has_everything():
    tensors = [tf.range(6.0), tf.ones([2, 2])]
    alone = Group((0,), 0)
    shards = flat_shards.reduce_scatter(tensors, alone, "sums")
    gathered = flat_shards.all_gather(shards, [(6,), (2, 2)], alone, "gathered")
    for found, expected in zip(gathered, tensors, strict=True):
        np.testing.assert_array_equal(found, expected)
