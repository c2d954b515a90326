"""Shapes and specs of tensors with unknown dimensions."""

import tensorflow as tf


def static_or_dynamic_shape(x: tf.Tensor) -> list:
    """Return the dimensions of a tensor or array: integers, or int32 scalars if unknown."""
    shape = tf.TensorShape(x.shape)
    if shape.is_fully_defined():
        return shape.as_list()
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(shape)]


def count_rows(x: tf.Tensor) -> int | tf.Tensor:
    """Return the first dimension of a tensor or ragged tensor: an int, or a scalar if unknown."""
    return tf.shape(x)[0] if x.shape[0] is None else x.shape[0]


def tensor_specs(tensors):
    """Return the `tf.TensorSpec` of each nested tensor. `None` stays `None`."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tensors
    )
