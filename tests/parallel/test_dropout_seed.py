"""Dropout masks depend only on the seed and keep the requested fraction."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.mesh.random_numbers import kept_elements, random_floats


def dropout_mask(shape, rate, seed=0, function=kept_elements):
    return function(shape, rate, tf.constant([seed, 7])).numpy()


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9, 0.998, 0.999])
def test_keep_fraction_matches_the_rate(rate):
    """The tolerance is four standard deviations of 2 million draws."""
    mean = np.mean([dropout_mask([500, 400], rate, seed).mean() for seed in range(10)])
    assert abs(mean - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / 2e6)


@pytest.mark.parametrize("shape", [[], [1], [3], [5, 7], [2, 3, 4, 5]])
def test_static_and_dynamic_shapes_give_the_same_mask(shape):
    assert dropout_mask(shape, 0.3).shape == tuple(shape)
    dynamic = tf.function(
        lambda size, seed: kept_elements([size, *shape], 0.3, seed), autograph=False
    )
    mask = dynamic(tf.constant(6), tf.constant([0, 7])).numpy()
    np.testing.assert_array_equal(mask, dropout_mask([6, *shape], 0.3))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.999])
def test_xla_gives_the_same_mask(rate):
    compiled = tf.function(lambda seed: kept_elements([40, 400], rate, seed), jit_compile=True)
    np.testing.assert_array_equal(compiled(tf.constant([0, 7])), dropout_mask([40, 400], rate))


@pytest.mark.parametrize("shape", [[8, 7], [8, 3, 5], [8, 2, 4, 16], [8, 33]])
@pytest.mark.parametrize("rate", [0.1, 0.999])
def test_parts_of_a_batch_have_the_masks_of_the_full_batch(shape, rate):
    expected = dropout_mask(shape, rate)
    for first, last in ((0, 3), (3, 4), (4, 8)):
        seed = tf.constant([0, 7, first, last - first], "int64")
        mask = kept_elements([last - first, *shape[1:]], rate, seed)
        np.testing.assert_array_equal(mask, expected[first:last])
        compiled = tf.function(lambda rows, seed: kept_elements([rows, *shape[1:]], rate, seed))
        mask = compiled(tf.constant(last - first), seed)
        np.testing.assert_array_equal(mask, expected[first:last])


def test_network_splits_each_row_into_several_rows():
    expected = dropout_mask([16, 5], 0.5)
    mask = kept_elements([8, 5], 0.5, tf.constant([0, 7, 3, 4], "int64"))
    np.testing.assert_array_equal(mask, expected[6:14])


@pytest.mark.parametrize("part", [0, 3])
def test_random_floats_of_parts_equal_the_full_batch(part):
    expected = random_floats([6, 5, 3], tf.constant([1, 2]), part).numpy()
    assert len(np.unique(expected)) == expected.size and 0 <= expected.min() < expected.max() < 1
    numbers = random_floats([2, 5, 3], tf.constant([1, 2, 4, 2]), part)
    np.testing.assert_array_equal(numbers, expected[4:])


def test_dropout_masks_of_rows_columns_and_seeds_are_independent():
    mask = dropout_mask([64, 64], 0.5)
    assert len(np.unique(mask, axis=0)) == len(np.unique(mask, axis=1)) == 64
    assert 0.45 < (mask == dropout_mask([64, 64], 0.5, seed=1)).mean() < 0.55
    # Two columns share one random word. They must be independent nevertheless.
    centered = dropout_mask([4000, 64], 0.3) - 0.7
    correlation = np.abs(centered.T @ centered / 4000 / 0.21)
    assert correlation[~np.eye(64, dtype=bool)].max() < 0.1
    columns = np.mean([dropout_mask([400, 50], 0.1, seed) for seed in range(20)], axis=(0, 1))
    assert np.abs(columns - 0.9).max() < 5 * np.sqrt(0.09 / 8000)


def test_call_index_gives_independent_masks():
    seed = tf.constant([3, 7])
    masks = [kept_elements([64, 64], 0.5, seed, index).numpy() for index in (0, 1, 2**31 - 1)]
    for i, mask in enumerate(masks[1:]):
        assert 0.45 < (mask == masks[i]).mean() < 0.55
    # Call indices may select shifted parts of one random sequence, so compare shifted masks.
    flat = [mask.reshape(-1) for mask in masks]
    for shift in range(1, 65):
        assert 0.45 < (flat[0][shift:] == flat[1][:-shift]).mean() < 0.55
    dynamic = tf.function(lambda index: kept_elements([64, 64], 0.3, seed, index))
    expected = kept_elements([64, 64], 0.3, seed, 2**31 - 1)
    np.testing.assert_array_equal(dynamic(tf.constant(2**31 - 1)), expected)
