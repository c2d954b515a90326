"""Variable factory: the one place that chooses the class of the Keras variable of a weight.

A new way to shard weights is a subclass of `ShardedVariable` and a case here; layers do not
know of it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    get_parallel_config,
    parallel_config,
)
from dtransformer.parallel.mesh.axis_rules import Specs, axis_size, mesh_axis, weight_specs
from dtransformer.parallel.mesh.variable import MeshVariable
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.weights.sharded_variable import Bounds, StoredValue, Weight
from dtransformer.parallel.zero.variables import FullyShardedVariable, MasterShardedVariable

# A weight's path, bounds and type -> that rectangle of its value, padding included.
ReadStored = Callable[[str, Bounds, str], np.ndarray]


_stored_values = Scoped("stored_values")


def values_from(read: ReadStored) -> contextlib.AbstractContextManager:
    """Let weights that are made in the `with` block begin with stored values.

    Each rank reads what it will hold, and nothing is drawn, which takes longer than to read.

    Args:
        read: a function of a weight's path, bounds in its full value, and the name of its type, that
            returns this rectangle.
    """
    return _stored_values.set(read)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Inside the `with` block, create weights of one device with shapes and without values."""
    one_device = parallel_config(TransformerOpParallelConfig())
    with job.alone(), one_device, _compat.without_values():
        yield


def make_variable(
    initializer: Callable,
    *,
    shape: tuple[int, ...],
    axes: tuple,
    path: str,
    dtype: str,
    compute_dtype: str,
    trainable: bool = True,
    has_constraint: bool = False,
    **kwargs,
) -> keras.Variable:
    """Make the Keras variable of a weight, stored as the config asks for.

    Args:
        initializer: a function of (shape, dtype) that returns the full value.
        shape: its full shape.
        axes: the logical name, or None, of every dimension.
        path: its path in the network.
        dtype: name of the type that it is stored in.
        compute_dtype: name of the type that it is computed with.
        trainable: whether the optimizer updates it.
        has_constraint: whether Keras projects it after every update.
        **kwargs: other arguments of `keras.Variable`.

    Raises:
        ValueError: the rules do not fit its axes and shape; names the weight.
    """
    if _stored_values.get() is not None:
        initializer = StoredValue(functools.partial(_stored_values.get(), path))
    specs = weight_specs(axes, shape, path)
    local_shape = [size // axis_size(spec) for size, spec in zip(shape, specs)]
    why_not = get_parallel_config().why_replicated(
        path, local_shape, tf.as_dtype(dtype).size, has_constraint
    )
    may_shard = trainable and not why_not  # over the ranks that train it together
    if job.mesh() is not None:
        stored = _stored_specs(specs, shape) if may_shard else specs
        make = functools.partial(MeshVariable, specs=stored, specs_in_use=specs)
    else:
        make = _flat_class(dtype, compute_dtype) if may_shard else Weight
    return make(initializer, shape=shape, dtype=dtype, trainable=trainable, **kwargs)


def _stored_specs(specs: Specs, shape: tuple[int, ...]) -> Specs:
    """Return how a weight is stored on the mesh: with `optimizer_shard=3` over all of its axes.

    Over the data and the context axis each the first dimension is sharded that is replicated and
    divisible. The sharded variable is unsharded wherever it is used.
    """
    if get_parallel_config().optimizer_shard != 3:
        return specs
    for axis in filter(None, map(mesh_axis, ("batch", "length_shards"))):
        for dimension, (size, spec) in enumerate(zip(shape, specs)):
            if spec is None and axis not in specs and size % axis_size(axis) == 0:
                specs = (*specs[:dimension], axis, *specs[dimension + 1 :])
    return specs


def _flat_class(dtype: str, compute_dtype: str) -> Callable:
    """Return the class of a weight without a mesh: flat shards over the data-parallel group."""
    config = get_parallel_config()
    level, is_flat = config.optimizer_shard, config.optimizer_shard_partition == "flat"
    if not level or not is_flat or job.data_parallel_group().size == 1:
        return Weight
    if level == 3:
        return FullyShardedVariable
    if tf.as_dtype(compute_dtype).size < tf.as_dtype(dtype).size:
        return functools.partial(MasterShardedVariable, copy_dtype=compute_dtype)
    return Weight
