"""Promise: the largest numbers of each row, and where they are, are those of `tf.math.top_k`."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.parallel.largest import largest


@pytest.mark.parametrize("num_columns", [10, 640, 2048, 8000, 8001])
@pytest.mark.parametrize("number", [1, 8])
def test_as_top_k(num_columns, number):
    rng = np.random.default_rng(0)
    x = rng.permuted(np.arange(3 * num_columns, dtype="float32").reshape(3, -1), axis=1)
    found, expected = largest(tf.constant(x), number), tf.math.top_k(x, number)
    np.testing.assert_array_equal(found[0], expected.values)
    np.testing.assert_array_equal(found[1], expected.indices)


def test_of_equal_numbers_the_first_ones_win():
    x = tf.zeros([2, 8000])
    np.testing.assert_array_equal(largest(x, 8)[1], [range(8)] * 2)
