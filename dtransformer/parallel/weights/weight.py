"""Keras variables of a network as a training step reads them."""

import keras
import tensorflow as tf


class Weight(keras.Variable):
    """Keras variable whose value is a constant for gradients if `trainable` is False.

    In a pipeline stage and in blocks that share a function, a compiled function computes a gradient
    for each variable that it reads. A constant needs none.
    """

    @property
    def value(self):
        return constant_if_frozen(self, super().value)


def constant_if_frozen(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return a value without gradient in functions, unless the variable is trainable."""
    if variable.trainable or not tf.inside_function():
        return value
    return tf.stop_gradient(value)


def trained_value(variable: keras.Variable) -> tf.Tensor:
    """Return the tensor for gradients of any Keras variable.

    This is the value, or the stored form of a `ShardedVariable`.
    """
    if hasattr(type(variable), "trained_value"):
        return variable.trained_value
    return variable.value
