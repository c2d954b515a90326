"""Stored numbers as weights have them: in C order, of the weight's type, finite; in little memory."""

import ml_dtypes
import numpy as np

from dtransformer.errors import InputError

FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_FLOAT_TYPES = {np.dtype(kind) for kind in FLOATS.values()}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Bits of the exponent, all set in what is not finite: NumPy knows no bfloat16.
_EXPONENTS = {np.dtype(np.float16): 0x7C00, _BFLOAT16: 0x7F80}
_ALIGNMENT = 64
# Elements that are looked at together, so that they stay in a core's cache.
_TOGETHER = 2**16
# Rows that are transposed together, and the elements between two of them in a buffer: where rows
# are some power of two apart, they would take the same places in the cache.
_ROWS, _APART = 128, 32


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
    converted = _cast(_in_order(value), kind)
    if kind in _FLOAT_TYPES and not _is_finite(converted.reshape(-1)):
        raise InputError(
            f"{name} has values that are not finite in {kind} (NaN, infinity, or too large): take "
            "other weights"
        )
    return converted


def _in_order(value):
    """Return a copy in C order: of a matrix that is stored transposed some rows after others.

    NumPy's own copy takes five times as long.
    """
    matrix = _transposed_matrix(value)
    if matrix is None:
        result = empty(value.shape, value.dtype)
        result[...] = value
        return result
    result = empty(value.shape, value.dtype)
    columns, (size, number) = result.view(matrix.dtype).reshape(matrix.shape), matrix.shape
    buffer = np.empty((_ROWS, size + _APART), matrix.dtype)
    for start in range(0, number, _ROWS):
        rows = matrix[:, start : start + _ROWS].T  # as they lie in the file
        part = buffer[: len(rows), :size]
        part[...] = rows
        columns[:, start : start + _ROWS] = part.T
    return result


def empty(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Return an array without values, which begins where TensorFlow can take it without a copy."""
    kind = np.dtype(kind)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, "u1")
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def _transposed_matrix(value):
    """Return a value as a matrix of which columns lie one after the other; None if it is none."""
    if value.dtype.itemsize not in (1, 2, 4, 8):
        return None
    raw = np.asarray(value).view(f"u{value.dtype.itemsize}")
    for number in range(1, raw.ndim):
        shape = int(np.prod(raw.shape[:number])), int(np.prod(raw.shape[number:]))
        try:
            matrix = raw.reshape(shape, copy=False)
        except ValueError:
            continue
        if matrix.strides[0] == raw.itemsize < matrix.strides[1]:
            return matrix
    return None


def _cast(value, kind):
    """Return a C-contiguous value in another floating-point type, or itself."""
    if value.dtype == _BFLOAT16 and kind == np.float32:  # its bits are the first half of these
        result = empty(value.shape, kind)
        bits, wide = value.reshape(-1).view("u2"), result.reshape(-1).view("u4")
        for some in _parts(bits.size):
            np.left_shift(bits[some], 16, out=wide[some], dtype="u4")
        return result
    with np.errstate(over="ignore", invalid="ignore"):
        return value.astype(kind, copy=False)


def _is_finite(flat):
    exponent = _EXPONENTS.get(flat.dtype)
    if exponent is not None:
        bits = flat.view("u2")
        return all((bits[some] & exponent).max() < exponent for some in _parts(bits.size))
    is_wide = flat.dtype.itemsize >= 4
    return all(
        np.isfinite(flat[some] if is_wide else flat[some].astype("f4")).all()
        for some in _parts(flat.size)
    )


def _parts(size):
    """Return the slices of some elements each that so many are."""
    return [slice(start, start + _TOGETHER) for start in range(0, size, _TOGETHER)]
