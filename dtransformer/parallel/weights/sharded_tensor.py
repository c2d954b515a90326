"""Tensors of the training state and this rank's shards of them."""

import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.weights.shard_bounds import (
    Bounds,
    CheckpointShard,
    local_shards,
    split_shard,
)
from dtransformer.parallel.weights.sharded_variable import (
    full_bounds,
    get_local_shards,
    get_shard_bounds,
    true_shape,
)

_MAX_SHARD_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """Tensor with a name in checkpoints, and this rank's shards of it.

    Args:
        name: Name in checkpoints.
        shape: Shape of the full tensor, without the padding of a vocabulary.
        variable: Keras or TensorFlow variable with this rank's local tensor.
        shards: Tuple of the shards that form the local tensor.
        is_saved: Whether checkpoints save this variable. Copies of other variables are only
            restored. Defaults to `True`.
    """

    name: str
    shape: tuple[int, ...]
    variable: object
    shards: tuple[CheckpointShard, ...]
    is_saved: bool = True

    @classmethod
    def from_variable(cls, name, shape, variable, bounds, flat_range=None) -> "ShardedTensor":
        """Create a tensor from this rank's bounds and range of the flattened rectangle."""
        return cls(name, shape, variable, tuple(local_shards(shape, bounds, flat_range)))

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return tf.as_dtype(self.variable.dtype).name

    @property
    def saved_shards(self) -> list[CheckpointShard]:
        """Shards divided into small parts for saving, because readers read full shards."""
        max_elements = _MAX_SHARD_BYTES // tf.as_dtype(self.dtype).size
        return [small for shard in self.shards for small in split_shard(shard, max_elements)]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's local tensor, with padding."""
        return tuple(self.variable.shape)

    def num_bytes(self, shard: CheckpointShard) -> int:
        """Return the number of bytes of a shard in a checkpoint."""
        return shard.num_elements * tf.as_dtype(self.dtype).size

    def read(self) -> tf.Tensor:
        """Return a copy of the local tensor in host memory."""
        with tf.device("CPU:0"):  # Host memory has room for the copy.
            return tf.identity(tf.convert_to_tensor(self.variable))

    def assign(self, value: tf.Tensor | np.ndarray) -> None:
        """Set the local tensor to a value of the same shape."""
        self.variable.assign(tf.cast(value, self.dtype))

    def assemble(self, read: Callable[[Bounds], tf.Tensor | np.ndarray]) -> tf.Tensor | np.ndarray:
        """Return the local tensor, assembled from rectangles of the full tensor.

        Args:
            read: Function that returns the rectangle of the full tensor with given bounds.
        """
        if [shard.local_shape for shard in self.shards] == [self.local_shape]:
            value = read(self.shards[0].bounds)
            if tuple(value.shape) == self.local_shape:
                return value
            values = [value]
        else:
            values = (read(shard.bounds) for shard in self.shards)
        flat = np.zeros(math.prod(self.local_shape), tf.as_dtype(self.dtype).as_numpy_dtype)
        for shard, value in zip(self.shards, values):
            padded = flat[shard.local_range].reshape(shard.local_shape)  # This is a view of `flat`.
            padded[shard.without_padding] = value
        return flat.reshape(self.local_shape)

    def extract(self, value: tf.Tensor, shard: CheckpointShard) -> tf.Tensor:
        """Return a shard of the local tensor `value`, without padding."""
        if value.shape != shard.local_shape or shard.num_elements != math.prod(value.shape):
            value = tf.reshape(tf.reshape(value, [-1])[shard.local_range], shard.local_shape)
            value = value[shard.without_padding]
        return value


def get_sharded_tensors(name: str, variable: keras.Variable) -> list[ShardedTensor]:
    """Return this rank's sharded tensors of a Keras variable.

    They include the 16-bit copy if one exists. It is restored, but not saved.
    """
    shape = true_shape(variable)
    places = zip(get_local_shards([variable]), get_shard_bounds(variable), strict=True)
    tensors = [ShardedTensor.from_variable(name, shape, local, *place) for local, place in places]
    if getattr(variable, "copy", None) is not None:
        bounds = full_bounds(variable.copy.shape)
        copy = ShardedTensor.from_variable(name, tuple(variable.copy.shape), variable.copy, bounds)
        tensors.append(dataclasses.replace(copy, is_saved=False))
    return tensors
