"""Optimizer states in bfloat16: float32 updates, then stochastic rounding.

Rounding to the nearest bfloat16 number would lose most small changes of a moving average. Stochastic
rounding keeps them on average: the probability of the upper neighbor is the distance to the lower
neighbor. The random numbers are a hash of the job's seed, the step, the weight's name and the position
of the element in the full weight. They do not depend on the layout or on a restart.
"""

import contextlib
import copy
import dataclasses
import hashlib
import math
import operator
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.parallel.weights.shard_bounds import (
    flat_range_bounds,
    get_shape,
    num_elements,
)
from dtransformer.parallel.weights.sharded_variable import full_bounds, true_shape
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.states import optimizer_states

_AVERAGE = "average"  # Keras' name for moving averages of weights.
# Odd constants with many set bits, so that consecutive seeds and steps give unrelated keys.
_SEED_FACTORS = (0x9E3779B1, 0x85EBCA77)
_STEP_FACTORS = (0xC2B2AE3D, 0x27D4EB2F)
# Multipliers of a 32-bit integer hash (github.com/skeeto/hash-prospector).
_HASH_FACTORS = (0x7FEB352D, 0x846CA68B)


def rounds_states() -> bool:
    """Return whether the config stores optimizer states in bfloat16."""
    return get_parallel_config().optimizer_state_dtype == "bfloat16"


@contextlib.contextmanager
def states_in_bfloat16(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Context manager in which an optimizer creates the states of weights in bfloat16.

    Moving averages of weights (`use_ema`) keep the weight's type.

    Args:
        optimizer: Keras optimizer that is not built.
    """
    add_variable = optimizer.add_variable_from_reference

    def add_in_bfloat16(reference_variable, name=None, initializer="zeros"):
        reference = reference_variable
        if name != _AVERAGE:
            if isinstance(reference, ParameterProxy):
                reference = copy.copy(reference)
            else:
                reference = ParameterProxy(reference, reference.shape)
            reference.dtype = tf.bfloat16
        return add_variable(reference, name=name, initializer=initializer)

    with _compat.patched(optimizer, add_variable_from_reference=add_in_bfloat16):
        yield


def is_rounded(name: str, state: keras.Variable, parameter) -> bool:
    """Return whether the update rounds a state: a bfloat16 moment in the parameter's shape.

    Args:
        name: String. Name of the state; see `optimizer_states`.
        state: Keras variable.
        parameter: Keras variable or `ParameterProxy` that the state belongs to.
    """
    is_average = name.endswith(_AVERAGE)
    has_shape = tuple(state.shape) == tuple(parameter.shape)
    return state.dtype == "bfloat16" and has_shape and not is_average


def check_dtypes(optimizer: keras.optimizers.Optimizer, parameters: list) -> None:
    """Check that a built optimizer has bfloat16 states.

    Args:
        optimizer: Built Keras optimizer.
        parameters: List of the Keras variables and `ParameterProxy`s that it updates.

    Raises:
        ValueError: If a state in the shape of a weight has another type.
    """
    for name, index, state in optimizer_states(optimizer, len(parameters)):
        if index is None or state.dtype == "bfloat16" or name.endswith(_AVERAGE):
            continue
        if tuple(state.shape) == tuple(parameters[index].shape):
            raise ValueError(
                f"{type(optimizer).__name__} was built with the {state.dtype} state {state.path}, but "
                "optimizer_state_dtype='bfloat16' needs bfloat16 states. Pass an optimizer to compile "
                "that is not built."
            )


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
    pattern = tf.bitcast(x, tf.uint32) + bits
    rounded = tf.bitcast(tf.bitwise.bitwise_and(pattern, _constant(0xFFFF0000)), tf.float32)
    return tf.cast(tf.where(tf.math.is_nan(x), x, rounded), tf.bfloat16)


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
        strides = [math.prod(weight_shape[i + 1 :]) for i in range(len(weight_shape))]
        rectangle = get_shape(bounds)
        parts = [full_bounds(rectangle)]
        if flat_range is not None:
            stop = min(flat_range[1], num_elements(bounds))
            parts = flat_range_bounds(rectangle, flat_range[0], stop)
        digest = hashlib.sha256(name.encode()).digest()
        numbers = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
        for part in parts:
            starts = [outer[0] + inner[0] for outer, inner in zip(bounds, part)]
            numbers.append(sum(map(operator.mul, starts, strides)) % 2**32)
        shapes = tuple(get_shape(part) for part in parts)
        return cls(tuple(unit_shape), tuple(strides), shapes, tuple(numbers))

    @property
    def key(self):
        """Hashable. Units with equal keys have equal bits for equal `numbers`."""
        return self.shape, self.strides, self.rectangles

    def halves(self, numbers, seed, step, count) -> list[tf.Tensor]:
        """Return random numbers below 2¹⁶ for the elements of several states.

        Args:
            numbers: Uint32 tensor with the values of `numbers`.
            seed, step: Uint32 scalar tensors.
            count: Integer. Number of states.

        Returns:
            A list of uint32 tensors of shape `shape`.
        """
        index = self._indices(numbers[2:])
        halves = []
        for pair in range(-(-count // 2)):
            keys = [
                numbers[i]
                + _constant(pair * _HASH_FACTORS[1])
                + seed * _constant(_SEED_FACTORS[i])
                + step * _constant(_STEP_FACTORS[i])
                for i in (0, 1)
            ]
            bits = _hash(index, *keys)
            halves.append(tf.bitwise.right_shift(bits, _constant(16)))
            halves.append(tf.bitwise.bitwise_and(bits, _constant(0xFFFF)))
        return halves[:count]

    def _indices(self, starts):
        """Return the index of each element in the flattened weight modulo 2³²."""
        parts = []
        for i, rectangle in enumerate(self.rectangles):
            index = starts[i]
            for axis, (size, stride) in enumerate(zip(rectangle, self.strides)):
                steps = np.arange(size, dtype="uint64") * np.uint64(stride)
                steps = steps.astype("uint32").reshape([size] + [1] * (len(rectangle) - axis - 1))
                index += tf.constant(steps)
            parts.append(tf.reshape(index, [-1]))
        flat = parts[0] if len(parts) == 1 else tf.concat(parts or [starts[:0]], 0)
        padding = math.prod(self.shape) - sum(map(math.prod, self.rectangles))
        if padding:
            flat = tf.concat([flat, tf.zeros([padding], tf.uint32)], 0)
        return tf.reshape(flat, self.shape)


class StateRounding:
    """Random bits for the states of all update units, and their seed.

    Args:
        units: List of `UpdateUnit`s.
        names: Dict from `id`s of weights to names that do not depend on the layout.

    Attributes:
        bits: List with the `ElementBits` of each unit.
        seed: Int64 scalar variable.
    """

    def __init__(self, units, names):
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
        self.seed = tf.Variable(0, trainable=False, dtype="int64")
        self.take_seed()

    def take_seed(self) -> None:
        """Derive the seed from the job's seed, which a checkpoint may have changed."""
        self.seed.assign(derived_seed("optimizer_states"))


def _hash(index, first_key, second_key):
    """Return 32 random bits for each index and pair of keys."""
    x = index + first_key
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _constant(16)))
    x = x * _constant(_HASH_FACTORS[0]) + second_key
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _constant(15)))
    x *= _constant(_HASH_FACTORS[1])
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _constant(16)))


def _constant(value):
    return tf.constant(value % 2**32, tf.uint32)
