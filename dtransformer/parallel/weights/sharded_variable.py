"""Keras variables of which a rank holds shards only."""

import contextlib
import itertools
from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import Bounds
from dtransformer.tensor_memory import as_tensor

# Where a shard lies: its bounds, and the range of the flattened block inside of them that the
# shard is; None where it is all of that block.
ShardBounds = tuple[Bounds, tuple[int, int] | None]


class ShardedVariable(keras.Variable):
    """A Keras variable of which this rank holds shards only; its shape is the full one.

    Attributes:
        shards: list of what this rank holds of it, as ordinary Keras variables.
        unsharded_for_use: whether it is unsharded wherever it is used.
        copy: a replicated `tf.Variable` in 16 bits, which computations use in its place; or None.
        num_assigned: how often the program has assigned it, of which this rank keeps its shards.
    """

    unsharded_for_use = False
    copy = None
    num_assigned = 0
    _unsharded = None  # its full value, in the host's memory, for `unsharded_on_chief`

    @property
    def trained_value(self) -> tf.Tensor:
        """What gradients are taken of: the value, or what is stored of it."""
        return self.value

    @property
    def shard_bounds(self) -> list[ShardBounds]:
        """Where the shards lie in the full tensor: a list of (bounds, flat range).

        Bounds are a tuple of (start, stop), one a dimension; a flat range is that of the
        flattened block inside of the bounds which the shard is, None where it is all of it.
        """
        raise NotImplementedError

    @property
    def value(self):
        current = _compat.stateless_value(self)
        if current is not None:
            return constant_if_frozen(self, self._as_used(self._maybe_autocast(current)))
        if _compat.in_symbolic_scope():  # shapes are asked for only
            return self._maybe_autocast(tf.zeros(self._shape, self._dtype))
        dropped = _compat.dropped_value(self)
        value = constant_if_frozen(self, self._read() if dropped is None else dropped)
        return _compat.known_as(value, self.path)

    def _read(self):
        """Return the full value where no value is given from outside."""
        raise NotImplementedError

    def _as_used(self, value):
        """Return a value that was given from outside as computations use it."""
        return value

    def assign(self, value):
        if tf.executing_eagerly():
            self.num_assigned += 1
        return super().assign(value)

    def __array__(self, dtype=None):
        return np.asarray(self.numpy(), dtype)


class StoredValue:
    """An initializer whose value is stored, of which any rectangle can be read by itself.

    Args:
        read: a function of bounds and of the name of a type that returns an array.
    """

    def __init__(self, read: Callable[[Bounds, str], np.ndarray]):
        self._read = read

    def rectangle(self, bounds: Bounds, dtype: str) -> tf.Tensor:
        """Return what lies inside of some bounds."""
        return as_tensor(self._read(bounds, dtype))

    def __call__(self, shape: tuple[int, ...], dtype: str) -> tf.Tensor:
        return self.rectangle(full_bounds(shape), dtype)


@contextlib.contextmanager
def unsharded_on_chief(variables: Iterable[keras.Variable]):
    """Inside the `with` block rank 0 alone can read the full values of variables.

    All ranks have to come here, as each sends its shards; rank 0 keeps the values in the
    host's memory.
    """
    sharded = [v for v in variables if isinstance(v, ShardedVariable)]
    try:
        for variable in sharded:
            value = variable.numpy()
            if job.is_chief():
                variable._unsharded = value
        yield
    finally:
        for variable in sharded:
            variable._unsharded = None


def trained_value(variable: keras.Variable) -> tf.Tensor:
    """Return what gradients of any Keras variable are taken of."""
    return variable.trained_value if isinstance(variable, ShardedVariable) else variable.value


def is_unsharded_for_use(variable) -> bool:
    """Return whether a tensor or variable is one that is unsharded where it is used."""
    return getattr(variable, "unsharded_for_use", False)


def own_shards(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return what this rank holds of variables: their shards, or the variable itself."""
    return list(
        itertools.chain.from_iterable(
            v.shards if isinstance(v, ShardedVariable) else [v] for v in variables
        )
    )


def shard_bounds_of(variable: keras.Variable) -> list[ShardBounds]:
    """Return where what this rank holds of any variable lies; see `ShardedVariable`."""
    if isinstance(variable, ShardedVariable):
        return variable.shard_bounds
    return [(full_bounds(variable.shape), None)]


def true_shape(variable: keras.Variable) -> tuple[int, ...]:
    """Return the shape of a full weight without the padding of a vocabulary."""
    return tuple(getattr(variable, "true_shape", variable.shape))


def full_bounds(shape: Iterable[int]) -> Bounds:
    """Return the bounds of a full tensor.

    Example:

    >>> full_bounds((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


class Weight(keras.Variable):
    """A Keras variable whose value is a constant to gradients where `trainable` is False.

    A compiled function has a gradient for each variable that it reads, whether anyone asks for it: in
    a stage of a pipeline, and in blocks that share a function. A constant has none.
    """

    @property
    def value(self):
        return constant_if_frozen(self, super().value)


def constant_if_frozen(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return what computations see of a variable's value: a constant, unless it is trained."""
    if variable.trainable or not tf.inside_function():
        return value
    return tf.stop_gradient(value)
