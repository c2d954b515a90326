"""Products of many small matrices, by the kernel that is fastest where they are computed."""

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.devices import device_type


def batch_matmul(x: tf.Tensor, y: tf.Tensor, transpose_y: bool = False) -> tf.Tensor:
    """Return x · y, or x · yᵀ; on CPUs in a loop that decodes single rows by TensorFlow's own kernel.

    That of oneDNN, which TensorFlow takes for `tf.matmul`, needs up to twice as long for one.

    Args:
        x: tensor [..., s, d].
        y: tensor [..., d, t], or [..., t, d].
    """
    is_decoded_row = trace.current().around_loop is not None and x.shape[-2] == 1
    if not is_decoded_row or x.dtype != "float32" or device_type() == "GPU":
        return tf.matmul(x, y, transpose_b=transpose_y)
    return tf.raw_ops.BatchMatMulV3(x=x, y=y, Tout=x.dtype, adj_y=transpose_y)
