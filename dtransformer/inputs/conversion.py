"""Stored numbers as weights have them: in C order, of the weight's type, finite; in little memory."""

import itertools
import math

import ml_dtypes
import numpy as np

from dtransformer.errors import InputError
from dtransformer.tensor_memory import empty

FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_FLOAT_TYPES = {np.dtype(kind) for kind in FLOATS.values()}
# Elements that are converted and looked at together, so that they stay in a core's cache.
_TOGETHER = 2**16
# Of a matrix that is stored transposed a tile is converted at once; and the elements between two
# rows of it in a buffer: where rows are some power of two apart, they would take the same places in
# the cache.
_ROWS, _COLUMNS, _APART = 512, 256, 16


def convert(value: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    """Return a stored value in the type of the weight that it is for, in C order.

    A floating-point type becomes another one, rounded; any other type stays what it is.

    Args:
        value: the value, or a view of it, transposed and indexed.
        kind: the weight's type.
        name: what it is, for messages.

    Raises:
        InputError: it has another kind of type; or values that are not finite in the new type.
    """
    kind = np.dtype(kind)
    if value.dtype != kind and not {value.dtype, kind} <= _FLOAT_TYPES:
        raise InputError(f"{name} is {value.dtype}, expected {kind}: convert it first")
    result = empty(value.shape, kind)
    matrix = _transposed_matrix(value)
    parts = _filled(result, value) if matrix is None else _filled_by_tiles(result, matrix)
    if not all(map(_is_finite, parts)):
        raise InputError(
            f"{name} has values that are not finite in {kind} (NaN, infinity, or too large): take "
            "other weights, or a wider type"
        )
    return result


def _filled(result, value):
    """Write a value into an array of its shape; yield what was written, part by part."""
    if result.ndim != 1 and value.flags.c_contiguous:
        result, value = result.reshape(-1), value.reshape(-1)
    if not result.ndim:
        result, value = result[None], value[None]
    each = max(_TOGETHER // max(math.prod(result.shape[1:]), 1), 1)
    for start in range(0, len(result), each):
        part = result[start : start + each]
        _cast(value[start : start + each], part)
        yield part


def _filled_by_tiles(result, matrix):
    """Write a matrix of which columns lie one after the other into an array in C order.

    Each tile is read as it lies in the file, converted, and written transposed: NumPy's own copy
    takes five times as long. Yields the converted tiles.
    """
    (size, number), bits = matrix.shape, f"u{result.itemsize}"
    columns = result.view(bits).reshape(matrix.shape)
    buffer = np.empty((_ROWS, _COLUMNS + _APART), result.dtype)
    for start, left in itertools.product(range(0, number, _ROWS), range(0, size, _COLUMNS)):
        rows = matrix[left : left + _COLUMNS, start : start + _ROWS].T
        part = buffer[: rows.shape[0], : rows.shape[1]]
        _cast(rows, part)
        yield part
        columns[left : left + _COLUMNS, start : start + _ROWS] = part.view(bits).T


def _transposed_matrix(value):
    """Return a value as a matrix of which columns lie one after the other; None if it is none."""
    if value.dtype.itemsize not in (1, 2, 4, 8):
        return None
    raw = np.asarray(value)
    for number in range(1, raw.ndim):
        shape = math.prod(raw.shape[:number]), math.prod(raw.shape[number:])
        try:
            matrix = raw.reshape(shape, copy=False)
        except ValueError:
            continue
        if matrix.strides[0] == raw.itemsize < matrix.strides[1]:
            return matrix
    return None


def _cast(value, result):
    """Write a value into an array of the same or another floating-point type."""
    with np.errstate(over="ignore", invalid="ignore"):
        result[...] = value


def _is_finite(part):
    """Return whether all of an array are finite, which a type that has no infinity always is."""
    if part.dtype not in _FLOAT_TYPES:
        return True
    return bool(np.isfinite(part if part.itemsize >= 4 else part.astype("f4")).all())
