"""Flat shards of all ranks restore a tensor, and only zeros pad them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.runtime.process_groups import Group

SHAPES = [(), (1,), (7,), (8,), (3, 5), (2, 3, 4)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shards_of_all_ranks_restore_the_tensor(shape, num_shards):
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    shards = flat_shards.to_shards(tf.constant(x), num_shards)
    division = Division.even(math.prod(shape), num_shards)
    assert shards.shape == (num_shards, division.sizes[0])
    np.testing.assert_array_equal(flat_shards.from_shards(shards, shape), x)
    assert np.abs(shards).sum() == pytest.approx(np.abs(x).sum(), 1e-5), "padded with zeros"
    for index in range(num_shards):
        group = Group(tuple(range(num_shards)), index)
        np.testing.assert_array_equal(
            flat_shards.get_local_shard(tf.constant(x), group), shards[index]
        )


def test_shards_have_minimal_size():
    sizes = [Division.even(n, d).sizes[0] for n, d in ((12, 4), (13, 4), (1, 4), (0, 4), (9, 1))]
    assert sizes == [3, 4, 1, 0, 9]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_only_the_owner_has_elements_of_a_whole_tensor(owner):
    division, x = Division.single_owner(6, 3, owner), tf.reshape(tf.range(6.0), [2, 3])
    for index in range(3):
        shard = flat_shards.get_local_shard(x, Group((0, 1, 2), index), division)
        np.testing.assert_array_equal(shard, range(6) if index == owner else [])
    assert [division.get_range(i)[1] for i in range(3)] == [6 * (i >= owner) for i in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_collectives_of_a_single_rank_return_the_tensors(dtype):
    tensors = [tf.cast(tf.range(6.0), dtype), tf.ones([2, 2], dtype)]
    alone = Group((0,), 0)
    shards = flat_shards.reduce_scatter(tensors, alone, "sums")
    gathered = flat_shards.all_gather(shards, [(6,), (2, 2)], alone, "weights")
    reduced = flat_shards.all_reduce(tensors, alone, "gradients", "float16")
    for results in (gathered, reduced):
        for tensor, expected in zip(results, tensors, strict=True):
            assert tensor.dtype == dtype
            np.testing.assert_array_equal(tensor, expected)


def test_by_dtype_batches_each_dtype_and_keeps_the_order():
    tensors = [tf.constant(i, dtype) for i, dtype in enumerate(["int32", "float32", "int32"])]
    calls = []

    def collective(tensors, names, dtype):
        calls.append((names, dtype))
        return [x + 10 for x in tensors]

    results = by_dtype(collective, tensors, ["a", "b", "c"])
    assert calls == [(["a", "c"], "int32"), (["b"], "float32")]
    assert [(x.dtype.name, int(x)) for x in results] == [
        ("int32", 10),
        ("float32", 11),
        ("int32", 12),
    ]
    assert by_dtype(collective, [], []) == [] and len(calls) == 2, (
        "an empty list must not call the collective"
    )
