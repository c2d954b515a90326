"""Hand-written gradients that also work on the mesh.

`depend_on`, `prevent_reuse` and `delay_seed` order the backward pass: they make its computations depend
on earlier gradients.
"""

from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing import trace

# Name scope of gradient operations.
GRADIENT_SCOPE = "gradient/"


def custom_gradient(function: Callable) -> Callable:
    """Return a function with a hand-written gradient, like `tf.custom_gradient`.

    Tensors that the gradient does not read are not stored. Gradient operations are named after the
    layer's operations. If no gradients are required, only the result is computed, since DTensor
    compiles few kinds of operations in loops.

    Args:
        function: Function of tensors that returns a `(result, gradient)` tuple. `gradient` takes
            the result's gradient and returns a gradient for each tensor.

    Returns:
        A function of the same tensors that returns the result.
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


def depend_on(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Return x with a dependency on dy, so nothing is computed from x before dy.

    Compilers and DTensor only respect value dependencies. The function therefore adds 0 computed
    from dy. It adds NaN instead if the element that it reads is NaN.
    """
    if x.shape != dy.shape or not trace.is_on_mesh():
        # On a mesh a single element is on one device. Reduce all elements, so every device waits.
        dy = tf.reduce_min(dy) if trace.is_on_mesh() else _first_element(dy)
    return x + tf.cast(tf.where(dy == dy, 0.0, float("nan")), x.dtype)


def prevent_reuse(x: tf.Tensor, depends_on: tf.Tensor) -> tf.Tensor:
    """Return x in a form that prevents XLA from reusing earlier results computed from x.

    XLA would store these results in memory, which is often slower than to compute them twice.
    Without XLA the function returns an identity.

    Args:
        x: A tensor.
        depends_on: Tensor that is computed before x is used again, see `depend_on`.
    """
    is_fused = _compat.is_compiled_by_xla() or tf.config.optimizer.get_jit()
    return depend_on(x, depends_on) if is_fused else tf.identity(x)


def delay_seed(seed: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Return the seed with a dependency on dy, so dropout masks are not drawn before dy.

    Masks depend only on shapes and the seed. Without the dependency they would be stored. On a mesh
    the seed is returned unchanged: a stored byte per element costs less than waiting for all
    devices.
    """
    if trace.is_on_mesh():
        return seed
    first = _first_element(dy)
    return seed + tf.cast(first != first, seed.dtype)


def _first_element(x):
    return tf.reduce_min(tf.reshape(x, [-1])[:1])
