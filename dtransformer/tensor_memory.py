"""Arrays whose memory TensorFlow takes as a tensor's, without a copy."""

import math

import numpy as np

# Where the memory of a tensor has to begin.
_ALIGNMENT = 64
_LEAST_BYTES = 2**16  # a smaller array is copied sooner


def empty(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Return an array without values, which begins where TensorFlow can take it without a copy.

    It is NumPy's memory, which asks for huge pages where an array is large: to be given each page
    of 4 KiB when it is first written takes about as long as to convert what is written.
    """
    kind = np.dtype(kind)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, "u1")
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def as_tensor(array: np.ndarray):
    """Return an array that nobody will change as a tensor, of the same memory where that pays."""
    import tensorflow as tf  # arrays alone do without

    is_known = array.dtype.kind in "fiu" or array.dtype == tf.bfloat16.as_numpy_dtype
    if array.ctypes.data % _ALIGNMENT or array.nbytes < _LEAST_BYTES or not is_known:
        return tf.constant(array)
    bits = array.view(f"u{array.itemsize}")  # a type that both packages know
    return tf.bitcast(tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), array.dtype)
