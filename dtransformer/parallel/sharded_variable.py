"""Keras variables of which a rank holds a shard only."""

import contextlib
import itertools

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from dtransformer.parallel import job


class ShardedVariable(keras.Variable):
    """A Keras variable of which this rank holds a part only; its shape is that of the whole.

    Attributes:
        shards: list of what this rank holds of it, as ordinary Keras variables.
    """

    # Whether it is made whole, from the shards of all ranks, wherever it is used.
    unsharded_for_use = False
    _gathered = None

    @property
    def trained_value(self):
        """What gradients are taken of: the value, or what is stored of it."""
        return self.value

    @property
    def places(self):
        """Where the shards lie in the whole: a list of (box, range).

        A box is a tuple of (start, stop), one a dimension; a range is that of the flattened
        box which the shard is, None where it is all of it.
        """
        raise NotImplementedError

    @property
    def value(self):
        if in_stateless_scope():
            current = get_stateless_scope().get_current_value(self)
            if current is not None:
                return self._to_use(self._maybe_autocast(current))
        if in_symbolic_scope():  # shapes are asked for only
            return self._maybe_autocast(tf.zeros(self._shape, self._dtype))
        return self._read()

    def _read(self):
        raise NotImplementedError

    def _to_use(self, value):
        """Return a value as computations use it."""
        return value

    def __array__(self, dtype=None):
        return np.asarray(self.numpy(), dtype)


@contextlib.contextmanager
def whole_on_chief(variables):
    """Inside the `with` block rank 0 alone can read whole variables.

    All ranks have to come here, and gather one variable after the other; rank 0 keeps
    them in the host's memory.
    """
    parted = [v for v in variables if isinstance(v, ShardedVariable)]
    try:
        for variable in parted:
            whole = variable.numpy()
            if job.is_chief():
                variable._gathered = whole
        yield
    finally:
        for variable in parted:
            variable._gathered = None


def trained_value(variable):
    """Return what gradients of any Keras variable are taken of."""
    return variable.trained_value if isinstance(variable, ShardedVariable) else variable.value


def is_unsharded_for_use(variable):
    """Return whether a tensor or variable is one that is made whole where it is used."""
    return getattr(variable, "unsharded_for_use", False)


def own_shards(variables):
    """Return what this rank updates of variables: their shards, or the variable itself."""
    return list(
        itertools.chain.from_iterable(
            v.shards if isinstance(v, ShardedVariable) else [v] for v in variables
        )
    )


def places_of(variable):
    """Return where what this rank updates of any variable lies; see `PartedVariable.places`."""
    if isinstance(variable, ShardedVariable):
        return variable.places
    return [(whole_bounds(variable.shape), None)]


def whole_bounds(shape):
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)
