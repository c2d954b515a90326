"""Gradients written by hand, which work on the mesh too."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel import trace

# Where the operations of gradients have their names.
GRADIENT_SCOPE = "gradient/"


def custom_gradient(function: Callable) -> Callable:
    """As `tf.custom_gradient`, where gradients may be asked for.

    Inside a loop on the mesh DTensor does not know the operation that it makes. The
    gradient's operations are named after the layer's.

    Args:
        function: a function of tensors that returns its result, and a function of the
            result's gradient that returns those of the tensors.
    """
    if not trace.current().has_gradients:
        return lambda *args: function(*args)[0]

    @tf.custom_gradient
    def named(*args):
        result, gradient = function(*args)
        scope = tf.get_current_name_scope()

        def named_gradient(*upstream):
            with tf.name_scope(f"{GRADIENT_SCOPE}{scope}/"):
                return gradient(*upstream)

        return result, named_gradient

    return named
