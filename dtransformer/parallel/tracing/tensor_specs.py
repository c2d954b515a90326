"""Shapes that are known in part."""

import tensorflow as tf


def static_or_dynamic_shape(x: tf.Tensor) -> list:
    """Return the dimensions of a tensor or array: ints where known, int32 scalars elsewhere."""
    shape = tf.TensorShape(x.shape)
    if shape.is_fully_defined():
        return shape.as_list()
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(shape)]


def number_of_rows(x: tf.Tensor) -> int | tf.Tensor:
    """Return the first dimension of a tensor, a ragged one too: an int where it is known."""
    return tf.shape(x)[0] if x.shape[0] is None else x.shape[0]


def tensor_specs(tensors):
    """Return the `tf.TensorSpec`s of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tensors
    )
