"""Guard that keeps TensorFlow from taking Horovod's operations for pure functions.

In a `tf.function` it would compute one of a constant only once, make one of two that look
alike, and drop one whose result is not used, each on some ranks and not on others.
"""

import tensorflow as tf


def never_constant(x: tf.Tensor) -> tf.Tensor:
    """Return x, sliced from a 0 that TensorFlow cannot compute beforehand, without a copy.

    A collective of a constant would be computed once, when a function is compiled, and never again:
    ranks whose input is none would wait for it.
    """
    if tf.executing_eagerly():
        return x
    rank = x.shape.rank
    if rank not in range(1, 9):  # a scalar, an unknown rank, or more than `Slice` can do
        return tf.reshape(never_constant(tf.reshape(x, [-1])), tf.shape(x))
    with tf.device("CPU:0"):
        zeros = tf.raw_ops.RandomUniformInt(shape=[rank], minval=0, maxval=1, seed=1, seed2=1)
    y = tf.raw_ops.Slice(input=x, begin=zeros, size=[-1] * rank)
    y.set_shape(x.shape)
    return y


def tied(value: tf.Tensor, y: tf.Tensor | None) -> tf.Tensor:
    """Return `value`, for which y has to be computed first, and compute y in any case.

    "In any case" does not hold in the functions that TensorFlow makes of gradients where
    the tape is around a `tf.function`: they compute what their results depend on.
    """
    if y is None or tf.executing_eagerly():
        return value
    first = tf.reshape(y, [-1])[:1]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[first])]):
        return tf.identity(value)
