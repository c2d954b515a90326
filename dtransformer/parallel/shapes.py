"""Shapes that are known in part."""

import tensorflow as tf


def static_or_dynamic_shape(x: tf.Tensor) -> list:
    """Return the dimensions of `x`: ints where they are known, int32 scalars elsewhere."""
    if x.shape.is_fully_defined():
        return x.shape.as_list()
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(x.shape)]
