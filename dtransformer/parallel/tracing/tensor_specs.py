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


def open_specs(tensors, specs):
    """Return the specs of nested tensors, with those dimensions open that are told to vary.

    Args:
        tensors: nested tensors, or specs of known shapes, or None.
        told: nested specs of the same structure, whose dimensions that vary are None; or None
            where nothing is told. What is of another structure tells nothing.
    """
    try:
        tf.nest.assert_same_structure(tensors, specs)
    except (TypeError, ValueError):
        return tensor_specs(tensors)

    def opened(x, like):
        if x is None or not isinstance(like, tf.TensorSpec) or like.shape.rank != x.shape.rank:
            return tensor_specs(x)
        sizes = zip(x.shape, like.shape)
        return tf.TensorSpec([None if specs is None else size for size, specs in sizes], x.dtype)

    return tf.nest.map_structure(opened, tensors, specs)
