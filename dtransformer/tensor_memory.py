"""Arrays that TensorFlow can use as tensors without a copy."""

import math

import numpy as np

_ALIGNMENT = 64  # TensorFlow requires this alignment of a tensor's memory, in bytes.
_MIN_BYTES = 2**16  # Copying a smaller array is faster.


def empty(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Return an uninitialized array whose memory is aligned for TensorFlow.

    NumPy requests huge pages for large arrays. Faulting in pages of 4 KiB on the first write would
    take about as long as the conversion of the data.
    """
    kind = np.dtype(kind)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, "u1")
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def as_tensor(array: np.ndarray):
    """Return an array as a tensor, without a copy if it is large and aligned.

    The array must not change afterwards, because the tensor may share its memory.
    """
    import tensorflow as tf  # The import is local because `empty` does not need TensorFlow.

    is_known = array.dtype.kind in "fiu" or array.dtype == tf.bfloat16.as_numpy_dtype
    if array.ctypes.data % _ALIGNMENT or array.nbytes < _MIN_BYTES or not is_known:
        return tf.constant(array)
    # DLPack transfers unsigned integers, because NumPy has no standard bfloat16.
    bits = array.view(f"u{array.itemsize}")
    return tf.bitcast(tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), array.dtype)
