"""Elementwise operations that XLA compiles into one pass over memory on CPUs.

TensorFlow's operations read and write memory one by one, and its packages use no AVX-512 for them.
On GPUs XLA's clusters contain these operations.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.gpu_calls import takes_gpu_branch
from dtransformer.parallel.tracing import trace

# Minimum number of elements. For smaller tensors, the call takes longer than a pass over memory.
MIN_ELEMENTS = 2**18

_is_enabled = False


def enable_fusion(enabled: bool) -> None:
    """Set whether `fused` compiles functions in this process. On GPUs it never does."""
    global _is_enabled
    _is_enabled = enabled and not takes_gpu_branch()


def fused(function: Callable) -> Callable:
    """Return a function of tensors that XLA compiles if its largest argument is large.

    XLA compiles once for each shape. Arguments with unknown dimensions are therefore computed
    without XLA, and also tensors on a mesh and in eager mode. Gradient tapes do not record compiled
    functions, so call this in a `custom_gradient`.

    Args:
        function: Function of tensors without matrix products. It may also read other tensors.
    """

    def run(*args):
        sizes = [math.prod(arg.shape) for arg in args if arg.shape.is_fully_defined()]
        if len(sizes) < len(args) or max(sizes) < MIN_ELEMENTS or not _can_compile():
            return function(*args)
        compiled = tf.function(function, autograph=False, jit_compile=True)
        traced = compiled.get_concrete_function(*args)  # The function may contain a tape.
        with _compat.without_tapes():
            return traced(*args)

    return run


def _can_compile():
    is_traced_on_device = not tf.executing_eagerly() and not trace.is_on_mesh()
    return _is_enabled and is_traced_on_device and not _compat.is_compiled_by_xla()
