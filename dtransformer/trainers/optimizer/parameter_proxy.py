"""Parameter proxy: stands for a weight or a shard in a Keras optimizer."""

import tensorflow as tf

from dtransformer import _compat


def _add_operators(cls):
    """Give a class the operators of a tensor, as `tf.Variable` has them."""
    # Equality of tensors is elementwise. Objects in sets and dicts need the default.
    for name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
        operator = getattr(tf.Tensor, name)
        setattr(cls, name, lambda self, *args, op=operator: op(tf.convert_to_tensor(self), *args))
    return cls


@_add_operators
class ParameterProxy:
    """Parameter of a Keras optimizer without storage: its value is bound for one update.

    Between `bind` and `unbind`, the optimizer reads and assigns a tensor. An update therefore is
    a function of tensors, and no second copy of a weight exists. This allows an optimizer to

    - update a flat shard, which has another shape than its weight and no variable,
    - update a full weight whose shards are stored on a mesh,
    - share one traced and compiled function among equal weights.

    `keras.optimizers.Optimizer.stateless_apply` cannot replace this class. It raises an error on
    the TensorFlow backend, because TensorFlow's optimizer reads variable handles. It would also
    require all parameters and all states in each call, which excludes shared functions, and would
    copy all states.

    The optimizer's states are ordinary variables of the proxy's shape. The optimizer finds them by
    the key of the owner's variable, and excludes weights from weight decay by the owner's name.

    Args:
        owner: Keras variable that the parameter is a part of.
        shape: Shape of the values.
        constraint: Function that projects the value after an update. `None` disables it.
        weight: Full Keras variable that `owner` is a shard of. Defaults to `owner`.
        dtype: `tf.DType` of the values. Defaults to the owner's.
    """

    trainable = True

    def __init__(self, owner, shape, constraint=None, weight=None, dtype=None):
        self.shape = tf.TensorShape(shape)
        self._dtype = dtype or owner.value.dtype  # `declared_dtype` replaces it.
        self.name = owner.name
        self.path = owner.path
        self.constraint = constraint
        self.weight = owner if weight is None else weight
        self.device = owner.value.device
        self._unique_id = _compat.variable_key(owner.value)
        self._value = None

    @property
    def dtype(self):
        """`tf.DType` of the values."""
        return self._dtype

    @property
    def value(self):
        """Current value, a tensor."""
        return tf.convert_to_tensor(self)

    @property
    def bound(self):
        """The tensor or the variable that was passed to `bind`, or the tensor assigned since then."""
        return self._value

    @property
    def ndim(self):
        """Number of dimensions."""
        return self.shape.rank

    def compute_in(self, dtype):
        """Set the `tf.DType` of the values in updates."""
        self._dtype = dtype

    def bind(self, value):
        """Set the value: a tensor of `shape`, or a variable to assign updates to."""
        self._value = value

    def unbind(self):
        """Remove and return the updated tensor or the variable."""
        value = self._value
        self._value = None
        return value

    def assign(self, value):
        value = self._converted(value)
        if isinstance(self._value, tf.Variable):
            self._value.assign(value)
        else:
            self._value = value

    def assign_add(self, value):
        if isinstance(self._value, tf.Variable):
            self._value.assign_add(self._converted(value))
        else:
            self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value):
        if isinstance(self._value, tf.Variable):
            self._value.assign_sub(self._converted(value))
        else:
            self.assign(self._value - tf.cast(value, self.dtype))

    def _converted(self, value):
        value = tf.cast(value, self.dtype)
        return value if value.shape == self.shape else tf.reshape(value, self.shape)

    def __tf_tensor__(self, dtype=None, name=None):
        if self._value is None:
            raise ValueError(
                f"The optimizer reads {self.path} outside of an update, where a shard has no value. "
                "Set optimizer_shard=0, or set optimizer_shard_partition='whole' without "
                "model_parallel."
            )
        return tf.convert_to_tensor(self._value, dtype, name=name)
