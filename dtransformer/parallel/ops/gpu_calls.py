"""Integer type of device computations, and checks for GPU library kernels."""

import contextlib
import functools
from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.runtime.devices import device_type
from dtransformer.parallel.runtime.devices import takes_gpu_branch as takes_gpu_branch
from dtransformer.parallel.tracing import trace

# Type of integers that a device computes with. TensorFlow's GPU kernels for int32 (sums, products,
# comparisons and even reshapes) use host memory.
INDEX_TYPE = "int64"
_MIN_CAPABILITY = 8, 0


def is_on_gpu() -> bool:
    """Return whether operations are placed on a GPU."""
    return device_type() == "GPU"


def obstacle_to_calls() -> str | None:
    """Return the reason why library kernels cannot be called, or `None` if they can.

    They cannot be called on GPUs with a compute capability below 8.0.
    """
    if is_on_gpu() and (capability := _capability()) < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None


def compiled(function: Callable) -> Callable:
    """Return a function that XLA compiles on GPUs.

    On a mesh it is `function` itself, since DTensor ignores functions. See `compiled_cluster`.
    """
    if trace.is_on_mesh():
        return function
    return tf.function(function, autograph=False, jit_compile=True if is_on_gpu() else None)


def compiled_cluster() -> contextlib.AbstractContextManager:
    """Return a context manager whose operations XLA compiles as a cluster, also on a mesh."""
    return tf.xla.experimental.jit_scope()


@functools.cache
def _capability():
    """Return the lowest compute capability of the GPUs as a tuple, or `(0, 0)` if it is unknown."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return min(x.get("compute_capability", (0, 0)) for x in details)
