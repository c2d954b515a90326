"""Shapes that are known in part."""

import tensorflow as tf


def static_or_dynamic_shape(x: tf.Tensor) -> list:
    """Return the dimensions of `x`: ints where they are known, int32 scalars elsewhere."""
    if x.shape.is_fully_defined():
        return x.shape.as_list()
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(x.shape)]


def specs_of(tensors):
    """Return the `tf.TensorSpec`s of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tensors
    )
