"""Keras variables that gradients stop at, once they are frozen.

A compiled function has a gradient for each variable that it reads, whether anyone asks for it: in
a stage of a pipeline, and in blocks that share a function. A constant has none.
"""

import keras
import tensorflow as tf


class Weight(keras.Variable):
    """A Keras variable whose value is a constant to gradients where `trainable` is False."""

    @property
    def value(self):
        return constant_if_frozen(self, super().value)


def constant_if_frozen(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return what computations see of a variable's value: a constant, unless it is trained."""
    if variable.trainable or not tf.inside_function():
        return value
    return tf.stop_gradient(value)
