"""Gradients written by hand, which work on the mesh too.

`after` and those below it make what the backward pass computes depend on gradients before it.
"""

from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing import trace

# Where the operations of gradients have their names.
GRADIENT_SCOPE = "gradient/"


def custom_gradient(function: Callable) -> Callable:
    """As `tf.custom_gradient` of tensors, where gradients may be asked for.

    What the gradient does not read is not kept for it. The gradient's operations are named after
    the layer's. Where no gradients are asked for there is only the result: DTensor compiles few
    kinds of operations in loops.

    Args:
        function: a function of tensors that returns its result, and a function of the
            result's gradient that returns those of the tensors.
    """
    if not trace.has_gradients():
        return lambda *args: function(*args)[0]

    def named(*args):
        result, gradient = function(*args)
        scope = tf.get_current_name_scope()

        def named_gradient(*upstream):
            with tf.name_scope(f"{GRADIENT_SCOPE}{scope}/"):
                return gradient(*upstream)

        return result, named_gradient

    def run(*args):
        if tf.executing_eagerly():
            return tf.custom_gradient(named)(*args)
        return _compat.with_gradient(named, [tf.convert_to_tensor(arg) for arg in args])

    return run


def after(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Return x once dy is known: nothing may be computed from it before.

    Compilers, and DTensor, respect a dependence on values only: what is added is 0 where
    dy is a number.
    """
    if x.shape != dy.shape or not trace.is_on_mesh():
        # On a mesh a single element lies on one device: there all are looked at.
        dy = tf.reduce_min(dy) if trace.is_on_mesh() else _first_element(dy)
    return x + tf.cast(tf.where(dy == dy, 0.0, float("nan")), x.dtype)


def computed_anew(x: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
    """Return x: what is computed from it XLA does not take from where it was computed before.

    It would write that to memory, which is often slower than computing it twice. So it is where XLA
    compiles, or clusters are left to it.

    Args:
        x: a tensor.
        known: a tensor that is known by then.
    """
    is_fused = _compat.is_compiled_by_xla() or tf.config.optimizer.get_jit()
    return after(x, known) if is_fused else tf.identity(x)


def seed_after(seed: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Return the seed once dy is known: else masks are kept, as they depend on shapes only.

    On a mesh they are: a byte an element is less than what waiting for all devices costs.
    """
    if trace.is_on_mesh():
        return seed
    first = _first_element(dy)
    return seed + tf.cast(first != first, seed.dtype)


def _first_element(x):
    return tf.reduce_min(tf.reshape(x, [-1])[:1])
