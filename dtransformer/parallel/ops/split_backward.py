"""Kernel gradients that are computed later than input gradients.

A kernel's gradient is the product of its input and of the output gradient. Only the weight update
needs it. In `splitting_backward` the backward pass therefore keeps the two factors: the inputs are
collected in the forward pass, and `tf.GradientTape` returns the output gradient instead of the
kernel gradient.
"""

import contextlib
import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtransformer.parallel.tracing.trace import Scoped
from dtransformer.parallel.weights.sharded_variable import ShardedVariable
from dtransformer.parallel.weights.weight import trained_value

_inputs = Scoped("split_backward_inputs")


@contextlib.contextmanager
def splitting_backward() -> Iterator[dict[str, tf.Tensor]]:
    """Defer the gradients of all kernels that are multiplied in the `with` block.

    Yields:
        A dictionary that the forward pass fills: path of a kernel -> its input, `[rows, inputs]`.
    """
    inputs = {}
    with _inputs.set(inputs):
        yield inputs


def not_splitting_backward() -> contextlib.AbstractContextManager:
    """Compute all gradients in one pass inside the `with` block."""
    return _inputs.set(None)


def is_splitting_backward() -> bool:
    """Return whether gradients of kernels are deferred here."""
    return _inputs.get() is not None


def is_split(kernel: tf.Tensor | keras.Variable) -> bool:
    """Return whether the gradient of a kernel is deferred.

    True in `splitting_backward` for trainable variables that are not a `ShardedVariable`.
    """
    is_deferrable = isinstance(kernel, keras.Variable) and not isinstance(kernel, ShardedVariable)
    return is_deferrable and kernel.trainable and is_splitting_backward()


def product(x: tf.Tensor, kernel: keras.Variable, num_inputs: int) -> tf.Tensor:
    """Multiply x by a kernel with a deferred gradient.

    Args:
        x: Tensor of shape `[rows, inputs]`.
        kernel: Variable of shape `[*inputs, *outputs]`.
        num_inputs: Integer. Number of leading kernel dimensions to sum over.

    Returns:
        A tensor of shape `[rows, outputs]`.

    Raises:
        ValueError: If the kernel was already multiplied in this forward pass.
    """
    inputs = _inputs.get()
    if kernel.path in inputs:
        raise ValueError(
            f"{kernel.path} is multiplied more than once in a forward pass, which schedules with "
            "deferred weight gradients do not support. Use `pipeline_schedule='1f1b'`."
        )
    inputs[kernel.path] = x

    matrix = tf.reshape(tf.cast(kernel, x.dtype), [math.prod(kernel.shape[:num_inputs]), -1])

    @tf.custom_gradient
    def multiply(x, handle):
        del handle  # Unlike a tensor, a variable may have a gradient of any shape.
        return tf.matmul(x, matrix), lambda dy: (tf.matmul(dy, matrix, transpose_b=True), dy)

    return multiply(x, trained_value(kernel).handle)


def kernel_gradients(pairs: list[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    """Return kernel gradients of shape `[inputs, outputs]` from their factors.

    Args:
        pairs: List of tuples: x of shape `[rows, inputs]`, and the output gradient of shape
            `[rows, outputs]`.
    """
    gradients = [tf.matmul(x, tf.cast(dy, x.dtype), transpose_a=True) for x, dy in pairs]
    return [tf.cast(gradient, dy.dtype) for gradient, (_, dy) in zip(gradients, pairs)]
