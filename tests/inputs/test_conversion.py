"""Stored arrays are converted to the weight's order and type, checked, and copied only once."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.inputs.conversion import convert

BFLOAT16 = ml_dtypes.bfloat16
KINDS = [np.float32, np.float16, BFLOAT16, np.float64]
VIEWS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.T,
    "some rows": lambda x: x[3:170],
    "some columns": lambda x: x[:, 3:170],
    "transposed, some rows": lambda x: x.T[3:170],
    "transposed, some columns": lambda x: x.T[:, 3:170],
    "by heads": lambda x: x.T.reshape(192, 4, 75)[:, 1:3],
    "heads first": lambda x: x.T.reshape(3, 64, 300)[1:],
    "every other": lambda x: x[::2, ::3],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [np.float32, BFLOAT16])
def test_views_are_converted(stored, kind, view):
    matrix = np.random.default_rng(0).normal(size=(300, 192)).astype(stored)
    value = VIEWS[view](matrix)
    result = convert(value, kind, "a")
    assert (
        result.flags.c_contiguous and result.dtype == kind and not np.shares_memory(result, matrix)
    )
    np.testing.assert_array_equal(result, value.astype(kind))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (1, 1), (1, 5), (5, 1)])
def test_small_shapes_are_converted(shape):
    value = np.full(shape, 2.5, BFLOAT16)
    for kind in KINDS:
        np.testing.assert_array_equal(convert(value, kind, "a"), value.astype(kind))
    np.testing.assert_array_equal(convert(value.T, BFLOAT16, "a"), value.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_single_value_that_is_not_finite_is_found(kind, wrong):
    for place in (0, 2**16 - 1, 2**16, 2**17 + 4):
        value = np.ones(2**17 + 5, "float32")
        value[place] = wrong
        for stored in (value, value.astype(BFLOAT16)):
            with pytest.raises(InputError, match="the table has values that are not finite"):
                convert(stored, kind, "the table")


def test_transposed_matrix_needs_little_extra_memory():
    matrix = np.ones((2048, 1024), BFLOAT16)
    tracemalloc.start()
    try:
        convert(matrix.T, BFLOAT16, "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.4 * matrix.nbytes
