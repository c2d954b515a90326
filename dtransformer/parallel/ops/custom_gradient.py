"""Gradients written by hand, which work on the mesh too."""

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
    if not trace.current().has_gradients:
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
