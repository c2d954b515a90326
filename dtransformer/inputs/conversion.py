"""Conversion of stored arrays to the type of a weight, in C order and with little memory."""

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
# Number of elements that are converted and checked together, so that they stay in a core's cache.
_CHUNK_SIZE = 2**16
# Size of the tiles of a transposed matrix, and the gap between the rows of their buffer. Without a
# gap, the rows would be a power of two apart and compete for the same lines of the cache.
_BLOCK_ROWS = 512
_BLOCK_COLUMNS = 256
_ROW_GAP = 16


def convert(value: np.ndarray, kind: np.dtype, name: str) -> np.ndarray:
    """Convert a stored array to the type of a weight, in C order.

    Floating-point types are rounded to each other. Other types must already match.

    Args:
        value: Array, or a transposed or indexed view of it.
        kind: Type of the weight.
        name: Name of the weight, for error messages.

    Returns:
        Array of type `kind` in C order.

    Raises:
        InputError: If the types are incompatible, or a value is not finite in the new type.
    """
    kind = np.dtype(kind)
    if value.dtype != kind and not {value.dtype, kind} <= _FLOAT_TYPES:
        raise InputError(f"{name} has type {value.dtype}, expected {kind}. Convert it first.")
    result = empty(value.shape, kind)
    matrix = _transposed_matrix(value)
    parts = _fill(result, value) if matrix is None else _fill_by_tiles(result, matrix)
    if not all(map(_is_finite, parts)):
        raise InputError(
            f"{name} has values that are not finite in {kind} (NaN, infinity or too large). Use other "
            "weights or a wider type."
        )
    return result


def _fill(result, value):
    """Copy a value into an array of its shape and yield the converted parts."""
    if result.ndim != 1 and value.flags.c_contiguous:
        result = result.reshape(-1)
        value = value.reshape(-1)
    if not result.ndim:
        result = result[None]
        value = value[None]
    num_rows = max(_CHUNK_SIZE // max(math.prod(result.shape[1:]), 1), 1)
    for start in range(0, len(result), num_rows):
        part = result[start : start + num_rows]
        _cast(value[start : start + num_rows], part)
        yield part


def _fill_by_tiles(result, matrix):
    """Copy a matrix in column-major order into an array in C order and yield the converted tiles.

    Each tile is read in the file's order, converted, and written transposed. NumPy's copy takes
    five times as long.
    """
    size, num_rows = matrix.shape
    bits = f"u{result.itemsize}"
    columns = result.view(bits).reshape(matrix.shape)
    buffer = np.empty((_BLOCK_ROWS, _BLOCK_COLUMNS + _ROW_GAP), result.dtype)
    for start, left in itertools.product(
        range(0, num_rows, _BLOCK_ROWS), range(0, size, _BLOCK_COLUMNS)
    ):
        rows = matrix[left : left + _BLOCK_COLUMNS, start : start + _BLOCK_ROWS].T
        part = buffer[: rows.shape[0], : rows.shape[1]]
        _cast(rows, part)
        yield part
        columns[left : left + _BLOCK_COLUMNS, start : start + _BLOCK_ROWS] = part.view(bits).T


def _transposed_matrix(value):
    """Return a view of the value as a column-major matrix, or `None` if it has another order."""
    if value.dtype.itemsize not in (1, 2, 4, 8):
        return None
    raw = np.asarray(value)
    for axis in range(1, raw.ndim):
        shape = math.prod(raw.shape[:axis]), math.prod(raw.shape[axis:])
        try:
            matrix = raw.reshape(shape, copy=False)
        except ValueError:
            continue
        if matrix.strides[0] == raw.itemsize < matrix.strides[1]:
            return matrix
    return None


def _cast(value, result):
    with np.errstate(over="ignore", invalid="ignore"):
        result[...] = value


def _is_finite(part):
    """Return whether all elements are finite. Types other than floating point are always finite."""
    if part.dtype not in _FLOAT_TYPES:
        return True
    return bool(np.isfinite(part if part.itemsize >= 4 else part.astype("f4")).all())
