"""Optimizer states and adapters in bfloat16: float32 updates, then stochastic rounding.

Rounding to the nearest bfloat16 number would lose most small changes of a moving average. Stochastic
rounding keeps them on average: the probability of the upper neighbor is the distance to the lower
neighbor. The random numbers are a hash of the job's seed, the step, the weight's name and the position
of the element in the full weight. They do not depend on the layout or on a restart.
"""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.parallel.weights.shard_bounds import local_shards
from dtransformer.parallel.weights.sharded_variable import true_shape

_AVERAGE = "average"  # Keras' name for moving averages of weights.
# Factors of the seed, the step and the index of a pair of states in the two keys of a hash. They are
# odd and have many set bits, so that consecutive numbers give unrelated keys.
_SEED_FACTORS = (0x9E3779B1, 0x85EBCA77)
_STEP_FACTORS = (0xC2B2AE3D, 0x27D4EB2F)
_PAIR_FACTOR = 0x165667B1
# Factors of a 32-bit integer hash (github.com/skeeto/hash-prospector).
_HASH_FACTORS = (0x7FEB352D, 0x846CA68B)


@contextlib.contextmanager
def states_in_dtype(optimizer: keras.optimizers.Optimizer, dtype: str) -> Iterator[None]:
    """Context manager that lets an optimizer create the states of weights in a dtype.

    Moving averages of weights (`use_ema`) keep the weight's type.

    Args:
        optimizer: Keras optimizer that is not built.
        dtype: String. Name of the dtype.
    """
    add_variable = optimizer.add_variable_from_reference

    def add_in_dtype(reference_variable, name=None, initializer="zeros"):
        variables = [] if name == _AVERAGE else [reference_variable]
        with _compat.declared_dtype(variables, dtype):
            return add_variable(reference_variable, name=name, initializer=initializer)

    with _compat.patched(optimizer, add_variable_from_reference=add_in_dtype):
        yield


def is_rounded(name: str, state: keras.Variable, parameter) -> bool:
    """Return whether the update rounds a state: a bfloat16 moment in the parameter's shape.

    Args:
        name: String. Name of the state; see `optimizer_states`.
        state: Keras variable.
        parameter: Keras variable or `ParameterProxy` that the state belongs to.
    """
    is_moment = state.dtype == "bfloat16" and not name.endswith(_AVERAGE)
    return is_moment and tuple(state.shape) == tuple(parameter.shape)


def rounds_updates(weight: keras.Variable) -> bool:
    """Return whether updates of a weight are rounded to bfloat16."""
    return getattr(weight, "rounds_updates", False)


def round_to_bfloat16(x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Round a float32 tensor to bfloat16, up or down depending on random bits.

    The mean over all values of `bits` is `x`. NaN and infinity are unchanged.

    Args:
        x: Float32 tensor.
        bits: Uint32 tensor of the same shape, with values below 2¹⁶.

    Returns:
        A bfloat16 tensor.
    """
    # The upper 16 bits of a float32 number are a bfloat16 number.
    pattern = tf.bitwise.bitwise_and(tf.bitcast(x, "uint32") + bits, 0xFFFF0000)
    rounded = tf.bitcast(pattern, "float32")
    return tf.cast(tf.where(tf.math.is_nan(x), x, rounded), "bfloat16")


@dataclasses.dataclass(frozen=True)
class ElementBits:
    """Random bits of the elements of an update unit.

    Args:
        shape: Tuple of ints. Shape of the unit.
        strides: Tuple of ints. Strides of the full weight.
        rectangles: Tuple with the shape of each rectangle of the weight in the unit.
        numbers: Tuple of ints below 2³²: two keys of the weight, and the index of each rectangle's
            first element in the flattened weight.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rectangles: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]

    @classmethod
    def create(cls, name, weight_shape, unit_shape, bounds, flat_range) -> "ElementBits":
        """Return the bits of a part of a weight.

        Args:
            name: String. Name of the weight, equal for every layout.
            weight_shape: Shape of the full weight without padding.
            unit_shape: Shape of the part.
            bounds, flat_range: Location of the part; see `get_shard_bounds`.
        """
        strides = tuple(math.prod(weight_shape[i + 1 :]) for i in range(len(weight_shape)))
        parts = local_shards([stop for _, stop in bounds], bounds, flat_range)
        digest = hashlib.sha256(name.encode()).digest()
        numbers = [*np.frombuffer(digest[:8], "<u4").tolist()]
        for part in parts:
            first_index = sum(start * stride for (start, _), stride in zip(part.bounds, strides))
            numbers.append(first_index % 2**32)
        rectangles = tuple(part.local_shape for part in parts)
        return cls(tuple(unit_shape), strides, rectangles, tuple(numbers))

    @property
    def key(self):
        """Hashable. Units with equal keys have equal bits for equal `numbers`."""
        return self.shape, self.strides, self.rectangles

    def halves(self, numbers, keys, count) -> list[tf.Tensor]:
        """Return random numbers below 2¹⁶ for the elements of several states.

        Args:
            numbers: Uint32 tensor with the values of `numbers`.
            keys: Uint32 tensor [2] that depends on the seed and the step.
            count: Integer. Number of states.

        Returns:
            A list of uint32 tensors of shape `shape`.
        """
        index = self._indices(numbers[2:])
        keys += numbers[:2]
        halves = []
        for pair in range(-(-count // 2)):
            bits = _hash(index, keys[0] + pair * _PAIR_FACTOR, keys[1] + pair)
            halves.append(tf.bitwise.right_shift(bits, 16))
            halves.append(tf.bitwise.bitwise_and(bits, 0xFFFF))
        return halves[:count]

    def _indices(self, starts):
        """Return the index of each element in the flattened weight modulo 2³², 0 for padding."""
        parts = []
        for i, rectangle in enumerate(self.rectangles):
            index = starts[i]
            for size, stride in zip(rectangle, self.strides):
                steps = np.arange(size, dtype="uint64") * np.uint64(stride)
                index = index[..., None] + steps.astype("uint32")
            parts.append(tf.reshape(index, [-1]))
        padding = math.prod(self.shape) - sum(map(math.prod, self.rectangles))
        # tf.pad has no GPU kernel for this type.
        flat = tf.concat([*parts, np.zeros(padding, "uint32")], 0)
        return tf.reshape(flat, self.shape)


class StateRounding:
    """Random bits for the states and values of all update units, and their seed.

    Args:
        units: List of `UpdateUnit`s.
        names: Dict from `id`s of weights to names that do not depend on the layout.

    Attributes:
        bits: List with the `ElementBits` of each unit.
        rounds_values: List of Booleans. Whether the value of each unit is rounded.
    """

    def __init__(self, units, names):
        self.rounds_values = [rounds_updates(unit.weight) for unit in units]
        self.bits = [
            ElementBits.create(
                names.get(id(unit.weight), unit.weight.path),
                true_shape(unit.weight),
                unit.parameter.shape,
                unit.bounds,
                unit.flat_range,
            )
            for unit in units
        ]
        self._seed = tf.Variable(0, trainable=False, dtype="int64")
        self.take_seed()

    def take_seed(self) -> None:
        """Derive the seed from the job's seed, which a checkpoint may have changed."""
        self._seed.assign(derived_seed("optimizer_states"))

    def keys(self, step) -> tf.Tensor:
        """Return two keys of a step, a uint32 tensor [2]."""
        seed = tf.cast(self._seed, "uint32")
        return seed * _SEED_FACTORS + tf.cast(step, "uint32") * _STEP_FACTORS


def _hash(index, first_key, second_key):
    """Return 32 random bits for each index and pair of keys."""
    x = _xor_shift(index + first_key, 16) * _HASH_FACTORS[0] + second_key
    return _xor_shift(_xor_shift(x, 15) * _HASH_FACTORS[1], 16)


def _xor_shift(x, bits):
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, bits))
