"""Weights of which each rank of the data-parallel group holds a flat shard."""

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
    """A Keras variable of which each rank of the data-parallel group holds a flat shard.

    Args:
        initializer: a function of (shape, dtype) that returns the full value; it is
            in the memory of the host until it is sharded.
        **kwargs: as `keras.Variable` has them.
    """

    def _initialize_with_initializer(self, initializer):
        with tf.device("CPU:0"):
            value = tf.convert_to_tensor(initializer(self._shape, dtype=self._dtype))
        self._make_shards(value)
        self._value = None

    def _make_shards(self, value):
        """Make what this rank holds of the full value."""
        self.shards = [keras.Variable(_copy_of_shard(value), dtype=self._dtype, name=self.name)]

    @property
    def shard_bounds(self) -> list[ShardBounds]:
        group = job.data_parallel_group()
        own = Division.even(math.prod(self.shape), group.size).range_of(group.index)
        return [(full_bounds(self.shape), own)]

    def _direct_assign(self, value):
        self.shards[0].assign(_copy_of_shard(tf.constant(value)))

    def numpy(self) -> np.ndarray:
        """Return the full value. All ranks of the data-parallel group call together."""
        if self._unsharded is not None:
            return self._unsharded
        return all_gather(self, self.shards[0].value, f"read/{self.path}").numpy()


class MasterShardedVariable(FlatShardedVariable):
    """A sharded variable with a replicated copy in 16 bits, which computations use.

    The shards are what an optimizer updates: the master weights of mixed precision
    (Micikevicius et al., 2018, arXiv 1710.03740, §3.1). It takes their gradients'
    reduce-scattered sum, and all-gathers what it made of them in 16 bits.

    Args:
        initializer: as of `FlatShardedVariable`.
        copy_dtype: name of the copy's type.
        **kwargs: as `keras.Variable` has them.

    Attributes:
        copy: a `tf.Variable`.
    """

    def __init__(self, initializer: Callable, *, copy_dtype: str, **kwargs):
        self._copy_dtype = copy_dtype
        super().__init__(initializer, **kwargs)

    def _make_shards(self, value):
        super()._make_shards(value)
        self.copy = tf.Variable(tf.cast(value, self._copy_dtype), name=self.name)

    @property
    def trained_value(self) -> tf.Tensor:
        given = _compat.stateless_value(self)
        return self.copy if given is None else given

    def _read(self):
        return self._maybe_autocast(tf.convert_to_tensor(self.copy))

    def _direct_assign(self, value):
        super()._direct_assign(value)
        self.copy.assign(tf.cast(value, self._copy_dtype))


class FullyShardedVariable(FlatShardedVariable):
    """A sharded variable that is unsharded where it is used.

    All ranks of the data-parallel group have to read it together.
    """

    unsharded_for_use = True

    @property
    def trained_value(self) -> tf.Tensor:
        return self.shards[0].value

    def _read(self):
        if current_unsharding() is not None:
            return current_unsharding().unsharded(self)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is sharded over the ranks (optimizer_shard=3) and can be read by "
                "its Trainer (fit, evaluate, predict) and by generate only"
            )
        return self._maybe_autocast(all_gather(self, self.shards[0].value, f"read/{self.path}"))


def _copy_of_shard(value):
    """Return this rank's shard as a copy: TensorFlow's own would keep the full value in memory."""
    return np.array(flat_shards.own_shard(value, job.data_parallel_group()))
