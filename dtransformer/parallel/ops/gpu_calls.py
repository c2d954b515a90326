"""Integers that GPUs compute, and kernels of libraries that they call."""

import functools

import tensorflow as tf

from dtransformer.parallel.runtime.devices import device_type
from dtransformer.parallel.runtime.devices import takes_gpu_branch as takes_gpu_branch
from dtransformer.parallel.tracing import trace

# Of integers that a device computes: on a GPU TensorFlow's kernels of int32 (sums, products,
# comparisons, even a reshape) have their inputs and results in the host's memory.
INDEX_TYPE = "int64"
_LEAST_CAPABILITY = 8, 0


def is_on_gpu() -> bool:
    """Return whether what is computed here is computed on a GPU."""
    return device_type() == "GPU"


def obstacle_to_calls() -> str | None:
    """Return why no kernel of a library may be called here, or None where one may be."""
    if trace.is_on_mesh():
        return "tensors are on a mesh"
    if is_on_gpu() and (found := _capability()) < _LEAST_CAPABILITY:
        return f"the card has the compute capability {found[0]}.{found[1]}, less than 8.0"
    return None


@functools.cache
def _capability():
    """Return the lowest compute capability of the GPUs, a pair; (0, 0) where it is not known."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return min(x.get("compute_capability", (0, 0)) for x in details)
