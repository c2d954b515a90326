"""Keras variables with local shards."""

import contextlib
import itertools
from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import Bounds
from dtransformer.parallel.weights.weight import constant_if_frozen
from dtransformer.tensor_memory import as_tensor

# Position of a shard: its bounds, and the shard's range in the flattened block inside of them. None
# means the full block.
ShardBounds = tuple[Bounds, tuple[int, int] | None]


class ShardedVariable(keras.Variable):
    """Keras variable with the full shape and local shards.

    Attributes:
        shards: List of this rank's shards, as ordinary Keras variables.
        unsharded_for_use: Whether computations unshard the variable when they use it.
        copy: Replicated `tf.Variable` in 16 bits that computations use instead, or `None`.
    """

    unsharded_for_use = False
    copy = None
    _unsharded = None  # The full value in host memory. See `unsharded_on_chief`.

    @property
    def shard_bounds(self) -> list[ShardBounds]:
        """Positions of the shards in the full tensor, a list of `(bounds, flat_range)`.

        Bounds are a tuple of `(start, stop)` for each dimension. The flat range is the shard's
        range in the flattened block inside the bounds, or `None` for the full block.
        """
        raise NotImplementedError

    @property
    def value(self):
        current = _compat.stateless_value(self)
        if current is not None:
            return constant_if_frozen(self, self._as_used(self._maybe_autocast(current)))
        if _compat.in_symbolic_scope():  # Keras only asks for shapes here.
            return self._maybe_autocast(tf.zeros(self._shape, self._dtype))
        dropped = _compat.dropped_value(self)
        value = constant_if_frozen(self, self._read() if dropped is None else dropped)
        return _compat.with_variable_key(value, self.path)

    def _read(self):
        """Return the full value if no stateless scope supplies one."""
        raise NotImplementedError

    def _as_used(self, value):
        """Convert a value from a stateless scope to the layout of computations."""
        return value

    def __array__(self, dtype=None):
        return np.asarray(self.numpy(), dtype)


class StoredValue:
    """Initializer that reads rectangles of a stored value.

    Args:
        read: Function of the bounds and the name of a dtype that returns an array.
    """

    def __init__(self, read: Callable[[Bounds, str], np.ndarray]):
        self._read = read

    def rectangle(self, bounds: Bounds, dtype: str) -> tf.Tensor:
        """Return the part of the value inside the bounds."""
        return as_tensor(self._read(bounds, dtype))

    def __call__(self, shape: tuple[int, ...], dtype: str) -> tf.Tensor:
        return self.rectangle(full_bounds(shape), dtype)


@contextlib.contextmanager
def unsharded_on_chief(variables: Iterable[keras.Variable]):
    """Context manager that lets rank 0 read the full values of variables.

    All ranks must enter it to send their shards. Rank 0 keeps the values in host memory.
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


def is_unsharded_for_use(variable) -> bool:
    """Return whether a tensor or variable is unsharded when it is used."""
    return getattr(variable, "unsharded_for_use", False)


def get_local_shards(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return this rank's shards of variables. Variables that are not sharded are kept."""
    return list(
        itertools.chain.from_iterable(
            v.shards if isinstance(v, ShardedVariable) else [v] for v in variables
        )
    )


def get_shard_bounds(variable: keras.Variable) -> list[ShardBounds]:
    """Return the bounds of this rank's shards of any variable.

    See `ShardedVariable.shard_bounds`.
    """
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
