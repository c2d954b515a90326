"""Promise: a rank's part of a tensor is a few boxes, which cover it once and without padding."""

import itertools

import numpy as np
import pytest

from dtransformer.trainers.checkpoint.boxes import (
    boxes_of_range,
    pieces_of,
    size_of,
    spec_of,
    split,
)

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 2, 2, 2)]


def put_together(whole, pieces, flat):
    """Write the pieces of a part into an array of the whole's shape."""
    for piece in pieces:
        place = tuple(slice(*ends) for ends in piece.box)
        assert np.isnan(whole[place]).all(), "no entry comes twice"
        whole[place] = flat[piece.start : piece.stop].reshape(piece.shape)[piece.inside_slices]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_range_is_boxes_that_follow_each_other(shape):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in itertools.combinations(range(numbers.size + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        found = [numbers[tuple(slice(*ends) for ends in box)].ravel() for box in boxes]
        np.testing.assert_array_equal(np.concatenate(found), np.arange(start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_an_empty_range_is_no_box():
    assert boxes_of_range((3, 4), 5, 5) == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_flat_slices_of_all_ranks_are_the_whole(shape, number):
    expected = np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    size = -(-expected.size // number)
    padded = np.pad(expected.ravel(), (0, size * number - expected.size))
    whole = np.full(shape, np.nan)
    box = tuple((0, length) for length in shape)
    for rank in range(number):
        ends = rank * size, (rank + 1) * size
        put_together(whole, pieces_of(shape, box, ends), padded[slice(*ends)])
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("true_shape", [(5, 6), (7, 5), (8, 6), (4, 3)])
def test_flat_slices_of_boxes_of_a_padded_tensor_are_the_whole(true_shape, number):
    padded = np.full((8, 6), -1.0)
    padded[: true_shape[0], : true_shape[1]] = np.arange(np.prod(true_shape)).reshape(true_shape)
    whole = np.full(true_shape, np.nan)
    for box in itertools.product([(0, 4), (4, 8)], [(0, 3), (3, 6)]):
        part = padded[tuple(slice(*ends) for ends in box)].ravel()
        size = -(-part.size // number)
        for rank in range(number):
            ends = rank * size, (rank + 1) * size
            put_together(whole, pieces_of(true_shape, box, ends), part[slice(*ends)])
    np.testing.assert_array_equal(whole, padded[: true_shape[0], : true_shape[1]])


@pytest.mark.parametrize("most", [1, 5, 7, 12, 100])
@pytest.mark.parametrize("true_shape", [(5, 6), (7, 5), (8, 6)])
def test_small_pieces_are_the_large_one(true_shape, most):
    padded = np.arange(48.0).reshape(8, 6)
    whole = np.full(true_shape, np.nan)
    for piece in pieces_of(true_shape, ((0, 8), (0, 6))):
        small = split(piece, most)
        put_together(whole, small, padded.ravel())
        assert all(one.entries <= max(most, 6) for one in small)
    np.testing.assert_array_equal(whole, padded[: true_shape[0], : true_shape[1]])


def test_padding_alone_is_no_piece():
    assert pieces_of((5, 2), ((6, 8), (0, 2))) == []


def test_sizes_and_specs():
    assert size_of(((2, 4), (0, 6))) == 12
    assert size_of(()) == 1
    assert spec_of((8, 6), ((2, 4), (0, 6))) == "8 6 2,2:0,6"
    assert spec_of((8, 6), ((0, 8), (0, 6))) == ""
    assert spec_of((), ()) == ""
