"""A shard of a weight as an optimizer sees it: a variable without memory of its own."""

import keras
import tensorflow as tf

from dtransformer import _compat


class FlatParameter:
    """What a Keras optimizer needs of a `tf.Variable`, for a tensor that is handed in.

    Between `hold` and `release` the optimizer reads and assigns a tensor; so an update is
    a function, and no second copy of the weight is kept. Its states are ordinary variables
    of the shard's shape. Names are the owner's, by which weight decay is excluded.

    Args:
        owner: the Keras variable that it is a shard of.
        size: number of elements.
    """

    trainable, constraint = True, None

    def __init__(self, owner: keras.Variable, size: int):
        self.shape, self.dtype = tf.TensorShape([size]), owner.value.dtype
        self.name, self.path = owner.name, owner.path
        self.device, self._unique_id = owner.value.device, _compat.variable_key(owner.value)
        self._value = None

    def hold(self, value: tf.Tensor):
        """Take a value, a tensor [size]."""
        self._value = value

    def release(self) -> tf.Tensor:
        """Give the value back that it has now."""
        value, self._value = self._value, None
        return value

    def assign(self, value):
        self._value = tf.reshape(tf.cast(value, self.dtype), self.shape)

    def assign_add(self, value):
        self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value):
        self.assign(self._value - tf.cast(value, self.dtype))

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(self._value, dtype, name=name)

    def __mul__(self, other):
        return self._value * other
