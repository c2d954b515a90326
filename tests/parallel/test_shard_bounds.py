"""Rectangles of the full tensor cover a rank's flat shard once, without padding."""

import itertools

import numpy as np
import pytest

from dtransformer.parallel.weights.shard_bounds import (
    flat_range_bounds,
    local_shards,
    num_elements,
    slice_spec,
    split_shard,
)

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 2, 2, 2)]


def write(full, shards, flat):
    """Write the shards of a flattened local tensor into an array of the full tensor's shape."""
    for shard in shards:
        slices = tuple(slice(*bounds) for bounds in shard.bounds)
        assert np.isnan(full[slices]).all(), "rectangles must not overlap"
        full[slices] = flat[shard.local_range].reshape(shard.local_shape)[shard.without_padding]


@pytest.mark.parametrize("shape", SHAPES)
def test_flat_range_splits_into_consecutive_rectangles(shape):
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in itertools.combinations(range(tensor.size + 1), 2):
        all_bounds = flat_range_bounds(shape, start, stop)
        rectangles = [
            tensor[tuple(slice(*ends) for ends in bounds)].ravel() for bounds in all_bounds
        ]
        np.testing.assert_array_equal(np.concatenate(rectangles), np.arange(start, stop))
        assert len(all_bounds) <= max(2 * len(shape) - 1, 1)


def test_empty_range_has_no_rectangles():
    assert flat_range_bounds((3, 4), 5, 5) == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_flat_shards_of_all_ranks_cover_the_tensor(shape, num_ranks):
    expected = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    size = -(-expected.size // num_ranks)
    padded = np.pad(expected.ravel(), (0, size * num_ranks - expected.size))
    full = np.full(shape, np.nan)
    bounds = tuple((0, length) for length in shape)
    for rank in range(num_ranks):
        ends = rank * size, (rank + 1) * size
        write(full, local_shards(shape, bounds, ends), padded[slice(*ends)])
    np.testing.assert_array_equal(full, expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("true_shape", [(5, 6), (7, 5), (8, 6), (4, 3)])
def test_flat_shards_of_padded_mesh_shards_cover_the_tensor(true_shape, num_ranks):
    padded = np.full((8, 6), -1.0)
    padded[: true_shape[0], : true_shape[1]] = np.arange(np.prod(true_shape)).reshape(true_shape)
    full = np.full(true_shape, np.nan)
    for bounds in itertools.product([(0, 4), (4, 8)], [(0, 3), (3, 6)]):
        flat = padded[tuple(slice(*ends) for ends in bounds)].ravel()
        size = -(-flat.size // num_ranks)
        for rank in range(num_ranks):
            ends = rank * size, (rank + 1) * size
            write(full, local_shards(true_shape, bounds, ends), flat[slice(*ends)])
    np.testing.assert_array_equal(full, padded[: true_shape[0], : true_shape[1]])


@pytest.mark.parametrize("max_elements", [1, 5, 7, 12, 100])
@pytest.mark.parametrize("true_shape", [(5, 6), (7, 5), (8, 6)])
def test_split_shards_cover_the_original_shard(true_shape, max_elements):
    padded = np.arange(48.0).reshape(8, 6)
    full = np.full(true_shape, np.nan)
    for shard in local_shards(true_shape, ((0, 8), (0, 6))):
        parts = split_shard(shard, max_elements)
        write(full, parts, padded.ravel())
        assert all(part.num_elements <= max(max_elements, 6) for part in parts)
    np.testing.assert_array_equal(full, padded[: true_shape[0], : true_shape[1]])


def test_shard_of_padding_only_is_dropped():
    assert local_shards((5, 2), ((6, 8), (0, 2))) == []


def test_num_elements_and_slice_spec():
    assert num_elements(((2, 4), (0, 6))) == 12
    assert num_elements(()) == 1
    assert slice_spec((8, 6), ((2, 4), (0, 6))) == "8 6 2,2:0,6"
    assert slice_spec((8, 6), ((0, 8), (0, 6))) == ""
    assert slice_spec((), ()) == ""
