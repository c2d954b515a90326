"""Promise: what dropout keeps is a function of the seed, with the probability asked for."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.tracing.dropout_seed import kept_elements


def kept(shape, rate, seed=0, function=kept_elements):
    return function(shape, rate, tf.constant([seed, 7])).numpy()


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9, 0.998, 0.999])
def test_the_share_that_is_kept(rate):
    """Within four standard deviations of 2 million draws."""
    mean = np.mean([kept([500, 400], rate, seed).mean() for seed in range(10)])
    assert abs(mean - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / 2e6)


@pytest.mark.parametrize("shape", [[], [1], [3], [5, 7], [2, 3, 4, 5]])
def test_any_shape_known_or_not(shape):
    assert kept(shape, 0.3).shape == tuple(shape)
    unknown = tf.function(
        lambda size, seed: kept_elements([size, *shape], 0.3, seed), autograph=False
    )
    found = unknown(tf.constant(6), tf.constant([0, 7])).numpy()
    np.testing.assert_array_equal(found, kept([6, *shape], 0.3))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.999])
def test_xla_keeps_the_same(rate):
    compiled = tf.function(lambda seed: kept_elements([40, 400], rate, seed), jit_compile=True)
    np.testing.assert_array_equal(compiled(tf.constant([0, 7])), kept([40, 400], rate))


def test_no_two_rows_and_no_two_seeds_are_alike():
    mask = kept([64, 64], 0.5)
    assert len(np.unique(mask, axis=0)) == len(np.unique(mask, axis=1)) == 64
    assert 0.45 < (mask == kept([64, 64], 0.5, seed=1)).mean() < 0.55
    # Two columns share a word: they know nothing of each other.
    spread = kept([4000, 64], 0.3) - 0.7
    alike = np.abs(spread.T @ spread / 4000 / 0.21)
    assert alike[~np.eye(64, dtype=bool)].max() < 0.1
    columns = np.mean([kept([400, 50], 0.1, seed) for seed in range(20)], axis=(0, 1))
    assert np.abs(columns - 0.9).max() < 5 * np.sqrt(0.09 / 8000)


def test_numbers_known_or_not_tell_masks_of_one_seed_apart():
    seed = tf.constant([3, 7])
    masks = [kept_elements([64, 64], 0.5, seed, number).numpy() for number in (0, 1, 2**31 - 1)]
    for i, mask in enumerate(masks[1:]):
        assert 0.45 < (mask == masks[i]).mean() < 0.55
    # Also shifted: the numbers begin in other places of one sequence of random bits.
    flat = [mask.reshape(-1) for mask in masks]
    for shift in range(1, 65):
        assert 0.45 < (flat[0][shift:] == flat[1][:-shift]).mean() < 0.55
    unknown = tf.function(lambda number: kept_elements([64, 64], 0.3, seed, number))
    expected = kept_elements([64, 64], 0.3, seed, 2**31 - 1)
    np.testing.assert_array_equal(unknown(tf.constant(2**31 - 1)), expected)
