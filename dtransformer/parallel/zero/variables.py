"""Weights of which each rank of the data-parallel group holds a flat shard."""

import functools

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.sharded_variable import ShardedVariable, whole_bounds
from dtransformer.parallel.zero.gather import current_unsharding, gather


class FlatShardedVariable(ShardedVariable):
    """A Keras variable of which each rank of the data group holds a flat slice.

    Args:
        initializer: a function of (shape, dtype) that returns the whole value; it is
            in the memory of the host until it is cut.
        **kwargs: as `keras.Variable` has them.
    """

    def _initialize_with_initializer(self, initializer):
        with tf.device("CPU:0"):
            whole = tf.convert_to_tensor(initializer(self._shape, dtype=self._dtype))
        self._keep(whole)
        self._value = None

    def _keep(self, whole):
        """Make what this rank holds of the whole."""
        self.shards = [keras.Variable(_copy_of_shard(whole), dtype=self._dtype, name=self.name)]

    @property
    def places(self):
        own = flat_shards.own_range(self.shards[0].shape[0], job.data_parallel_group())
        return [(whole_bounds(self.shape), own)]

    def _direct_assign(self, value):
        self.shards[0].assign(_copy_of_shard(tf.constant(value)))

    def numpy(self):
        """Return the whole. All ranks of the data group have to call, as each holds a part."""
        if self._gathered is not None:
            return self._gathered
        return gather(self, self.shards[0].value, f"read/{self.path}").numpy()


class MasterShardedVariable(FlatShardedVariable):
    """A variable in slices, with a whole copy in 16 bits, which computations use.

    The slices are what an optimizer updates: the master weights of mixed precision
    (Micikevicius et al., 2018, arXiv 1710.03740, §3.1). It takes their sum of gradients in
    slices, and gathers what it made of them in 16 bits.

    Args:
        initializer: as of `SlicedVariable`.
        copy_dtype: name of the copy's type.
        **kwargs: as `keras.Variable` has them.

    Attributes:
        copy: a `tf.Variable`.
    """

    def __init__(self, initializer, *, copy_dtype, **kwargs):
        self._copy_dtype = copy_dtype
        super().__init__(initializer, **kwargs)

    def _keep(self, whole):
        super()._keep(whole)
        self.copy = tf.Variable(tf.cast(whole, self._copy_dtype), name=self.name)

    @property
    def trained_value(self):
        return self.copy

    def _read(self):
        return self._maybe_autocast(tf.convert_to_tensor(self.copy))

    def _direct_assign(self, value):
        super()._direct_assign(value)
        self.copy.assign(tf.cast(value, self._copy_dtype))


class FullyShardedVariable(FlatShardedVariable):
    """A variable in slices that is gathered where it is used.

    All ranks of the data group have to read it together.
    """

    unsharded_for_use = True

    @property
    def trained_value(self):
        return self.shards[0].value

    def _read(self):
        if current_unsharding() is not None:
            return current_unsharding().whole(self)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is cut over the ranks (optimizer_shard=3) and can be read by its "
                "Trainer (fit, evaluate, predict) and by generate only"
            )
        return self._maybe_autocast(gather(self, self.shards[0].value, f"read/{self.path}"))


def _copy_of_shard(whole):
    """Return this rank's slice as a copy: TensorFlow's own would keep the whole in memory."""
    return np.array(flat_shards.own_shard(whole, job.data_parallel_group()))


def variable_class(path, shape, dtype, trainable, constraint, compute_dtype):
    """Return how a weight is kept under the current config.

    Args:
        path, shape, dtype, trainable, constraint: the weight's.
        compute_dtype: name of the type that it is computed with.

    Returns:
        A function that makes the variable; None for an ordinary one.
    """
    config, size = get_parallel_config(), tf.as_dtype(dtype).size
    if not config.optimizer_shard or not trainable or job.data_parallel_group().size == 1:
        return None
    if config.why_whole(path, shape, size, constraint is not None):
        return None
    if config.optimizer_shard == 3:
        return FullyShardedVariable
    if tf.as_dtype(compute_dtype).size < size:
        return functools.partial(MasterShardedVariable, copy_dtype=compute_dtype)
    return None
