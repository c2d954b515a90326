"""Weights stored as one flat shard per rank of the data-parallel group."""

import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import ShardBounds, ShardedVariable, full_bounds
from dtransformer.parallel.zero.gather import all_gather, current_unsharding


class FlatShardedVariable(ShardedVariable):
    """A Keras variable stored as one flat shard per rank of the data-parallel group.

    Args:
        initializer: Function of a shape and a dtype that returns the full value. The value stays in
            host memory until it is sharded.
        **kwargs: Arguments of `keras.Variable`.
    """

    def _initialize_with_initializer(self, initializer):
        with tf.device("CPU:0"):
            value = tf.convert_to_tensor(initializer(self._shape, dtype=self._dtype))
        self._make_shards(value)
        self._value = None

    def _make_shards(self, value):
        self.shards = [keras.Variable(_copy_of_shard(value), dtype=self._dtype, name=self.name)]

    @property
    def shard_bounds(self) -> list[ShardBounds]:
        group = job.data_parallel_group()
        flat_range = Division.even(math.prod(self.shape), group.size).get_range(group.index)
        return [(full_bounds(self.shape), flat_range)]

    def _direct_assign(self, value):
        self.shards[0].assign(_copy_of_shard(tf.constant(value)))

    def numpy(self) -> np.ndarray:
        """Return the full value. All ranks of the data-parallel group must call."""
        if self._unsharded is not None:
            return self._unsharded
        return all_gather(self, self.shards[0].value, f"read/{self.path}").numpy()


class MasterShardedVariable(FlatShardedVariable):
    """A sharded variable with a replicated 16-bit copy that layers compute with.

    The shards are the master weights of mixed precision. The optimizer reduce-scatters gradients,
    updates the shards, and all-gathers new values in 16 bits.

    Reference:
        [Micikevicius et al., 2018, §3.1](https://arxiv.org/abs/1710.03740)

    Args:
        initializer: See `FlatShardedVariable`.
        copy_dtype: String. Dtype of the copy.
        **kwargs: Arguments of `keras.Variable`.

    Attributes:
        copy: `tf.Variable` of the full shape.
    """

    def __init__(self, initializer: Callable, *, copy_dtype: str, **kwargs):
        self._copy_dtype = copy_dtype
        super().__init__(initializer, **kwargs)

    def _make_shards(self, value):
        super()._make_shards(value)
        self.copy = tf.Variable(tf.cast(value, self._copy_dtype), name=self.name)

    @property
    def trained_value(self) -> tf.Tensor:
        value = _compat.stateless_value(self)
        return self.copy if value is None else value

    def _read(self):
        return self._maybe_autocast(tf.convert_to_tensor(self.copy))

    def _direct_assign(self, value):
        super()._direct_assign(value)
        self.copy.assign(tf.cast(value, self._copy_dtype))


class FullyShardedVariable(FlatShardedVariable):
    """A sharded variable that is all-gathered for each use.

    All ranks of the data-parallel group must read it together.
    """

    unsharded_for_use = True

    @property
    def trained_value(self) -> tf.Tensor:
        value = _compat.stateless_value(self)
        return self.shards[0].value if value is None else value

    def _read(self):
        if current_unsharding() is not None:
            return current_unsharding().unsharded(self)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is sharded over the ranks (optimizer_shard=3). Only its Trainer (fit, "
                "evaluate, predict) and generate can read it in a compiled function."
            )
        return self._maybe_autocast(all_gather(self, self.shards[0].value, f"read/{self.path}"))


def _copy_of_shard(value):
    """Return a copy of the local shard. A TensorFlow slice would keep the full value in memory."""
    return np.array(flat_shards.get_local_shard(value, job.data_parallel_group()))
