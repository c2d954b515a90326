"""Parameter proxy: a weight, or a shard of one, as an optimizer sees it, without memory of its own."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from dtransformer import _compat


def _with_operators(cls):
    """Let a class have the operators of a tensor, as a `tf.Variable` does."""
    for name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:  # which would hash
        operator = getattr(tf.Tensor, name)
        setattr(cls, name, lambda self, *args, op=operator: op(tf.convert_to_tensor(self), *args))
    return cls


@_with_operators
class ParameterProxy:
    """What a Keras optimizer needs of a `tf.Variable`, for a tensor that is handed in.

    Between `hold` and `release` the optimizer reads and assigns a tensor; so an update is
    a function, and no second copy of the weight is kept. Its states are ordinary variables
    of the tensor's shape. Names are the owner's, by which weight decay is excluded. It can
    hold a variable, too, which is assigned then.

    Args:
        owner: the Keras variable that it is made of.
        shape: shape of the tensor.
        constraint: what projects the weight after an update, or None.
    """

    trainable = True

    def __init__(self, owner: keras.Variable, shape: Sequence[int], constraint=None):
        self.shape, self.dtype = tf.TensorShape(shape), owner.value.dtype
        self.name, self.path, self.constraint = owner.name, owner.path, constraint
        self.device, self._unique_id = owner.value.device, _compat.variable_key(owner.value)
        self._value = None

    @property
    def value(self) -> tf.Tensor:
        """The tensor, or that of the variable."""
        return tf.convert_to_tensor(self)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.shape.rank

    def hold(self, value: tf.Tensor | tf.Variable):
        """Take a value, a tensor or a variable of `shape`."""
        self._value = value

    def release(self) -> tf.Tensor | tf.Variable:
        """Give the value back that it has now, or the variable."""
        value, self._value = self._value, None
        return value

    def assign(self, value):
        value = tf.reshape(tf.cast(value, self.dtype), self.shape)
        if isinstance(self._value, tf.Variable):
            self._value.assign(value)
        else:
            self._value = value

    def assign_add(self, value):
        self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value):
        self.assign(self._value - tf.cast(value, self.dtype))

    def __tf_tensor__(self, dtype=None, name=None):
        if self._value is None:
            raise ValueError(
                f"the optimizer reads {self.path} outside of an update, where a shard of it has no "
                "value: use optimizer_shard=0, or optimizer_shard_partition='whole' without "
                "model_parallel"
            )
        return tf.convert_to_tensor(self._value, dtype, name=name)
