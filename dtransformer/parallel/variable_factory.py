"""Variable factory: the only place that selects the Keras variable class of a weight.

To add a way to shard weights, add a subclass of `ShardedVariable` and a case here. Layers do not
change.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

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
from dtransformer.parallel.tracing.trace import Scoped
from dtransformer.parallel.weights.sharded_variable import Bounds, StoredValue
from dtransformer.parallel.weights.weight import Weight
from dtransformer.parallel.zero.variables import FullyShardedVariable, MasterShardedVariable

# Function of a weight's path, bounds and dtype that returns this part of its padded value.
ReadStored = Callable[[str, Bounds, str], np.ndarray]


_stored_values = Scoped("stored_values")

# Function of a kernel's path that returns its quantized format or `None`. Without a function, the
# setting of the layer applies.
quantization = Scoped("quantization")


def values_from(read: ReadStored) -> contextlib.AbstractContextManager:
    """Return a context manager that initializes new weights with stored values.

    Each rank reads only its shards, and no initial values are drawn, which would take longer.

    Args:
        read: Function of a weight's path, the bounds within its full value and the name of its
            dtype. It returns this part of the value as a NumPy array.
    """
    return _stored_values.set(read)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Context manager that creates weights without values, in the shapes of a single device."""
    one_device = parallel_config(TransformerOpParallelConfig())
    with job.alone(), one_device, _compat.without_values(), quantization.set(_no_format):
        yield


def _no_format(path):
    return None


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
    """Create the Keras variable of a weight with the storage that the config requests.

    Args:
        initializer: Function of `(shape, dtype)` that returns the full value.
        shape: Full shape.
        axes: Tuple with the logical axis of each dimension, or `None`.
        path: Path in the network.
        dtype: Name of the storage dtype.
        compute_dtype: Name of the dtype of computations.
        trainable: Whether the optimizer updates the weight. Defaults to `True`.
        has_constraint: Whether Keras applies a constraint after every update. Defaults to `False`.
        **kwargs: Other arguments of `keras.Variable`.

    Returns:
        A `keras.Variable`.

    Raises:
        ValueError: If the rules do not match the axes and the shape. The message has the path.
    """
    initializer = with_stored_value(initializer, path)
    specs = weight_specs(axes, shape, path)
    # Codes of quantized kernels are frozen, but they are large.
    may_shard = trainable or dtype == "uint8"
    may_shard = may_shard and may_shard_over_data(path, shape, specs, dtype, has_constraint)
    if job.mesh() is not None:
        stored = stored_specs(specs, shape) if may_shard else specs
        make = functools.partial(MeshVariable, specs=stored, specs_in_use=specs)
    else:
        make = _flat_class(dtype, compute_dtype) if may_shard else Weight
    return make(initializer, shape=shape, dtype=dtype, trainable=trainable, **kwargs)


def with_stored_value(initializer: Callable, path: str) -> Callable:
    """Return the initializer of a weight, which reads its stored value inside `values_from`.

    A `StoredValue` is returned unchanged.
    """
    if _stored_values.get() is None or isinstance(initializer, StoredValue):
        return initializer
    return StoredValue(functools.partial(_stored_values.get(), path))


def may_shard_over_data(
    path: str, shape: Sequence[int], specs: Specs, dtype: str, has_constraint: bool
) -> bool:
    """Return whether `optimizer_shard` may shard a trainable weight over its data-parallel ranks.

    Args:
        path, shape, dtype, has_constraint: As in `make_variable`.
        specs: Tuple with the mesh axis, or `None`, that shards each dimension.
    """
    local_shape = [size // axis_size(spec) for size, spec in zip(shape, specs)]
    item_bytes = tf.as_dtype(dtype).size
    config = get_parallel_config()
    return not config.why_replicated(path, local_shape, item_bytes, has_constraint)


def stored_specs(specs: Specs, shape: Sequence[int]) -> Specs:
    """Return the specs of a weight's storage on the mesh.

    With `optimizer_shard=3`, the data axis and the context axis each shard the first dimension that
    is replicated and divisible. The variable is unsharded when it is used.
    """
    if get_parallel_config().optimizer_shard != 3:
        return specs
    for axis in filter(None, map(mesh_axis, ("batch", "length_shards"))):
        for dimension, (size, spec) in enumerate(zip(shape, specs)):
            if spec is None and axis not in specs and size % axis_size(axis) == 0:
                specs = (*specs[:dimension], axis, *specs[dimension + 1 :])
    return specs


def _flat_class(dtype: str, compute_dtype: str) -> Callable:
    """Return the class of a weight without a mesh.

    Its shards, if any, are flat and divided over the data-parallel group.
    """
    config = get_parallel_config()
    level = config.optimizer_shard
    is_flat = config.optimizer_shard_partition == "flat"
    if not level or not is_flat or job.data_parallel_group().size == 1:
        return Weight
    if level == 3:
        return FullyShardedVariable
    if tf.as_dtype(compute_dtype).size < tf.as_dtype(dtype).size:
        return functools.partial(MasterShardedVariable, copy_dtype=compute_dtype)
    return Weight
