"""Gradients of kernels that are computed later than those of inputs.

A kernel's gradient is a product of the input and of the gradient of the output, which nobody
waits for until the weights are updated. Inside of `splitting_backward` the backward pass leaves the two
factors instead: the inputs are results of the forward pass, and what `tf.GradientTape` returns
for the kernel is the gradient of the output.
"""

import contextlib
import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.weights.sharded_variable import ShardedVariable, trained_value

_inputs = Scoped("split_backward_inputs")


@contextlib.contextmanager
def splitting_backward() -> Iterator[dict[str, tf.Tensor]]:
    """Leave the gradients of kernels that are multiplied with inside of the `with` block.

    Yields:
        A dict that is filled: path of a kernel -> what was multiplied with it, [rows, inputs].
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
    """Return whether the gradient of a kernel is left for later, here."""
    own = isinstance(kernel, keras.Variable) and not isinstance(kernel, ShardedVariable)
    return own and kernel.trainable and is_splitting_backward()


def product(x: tf.Tensor, kernel: keras.Variable, num_inputs: int) -> tf.Tensor:
    """Multiply x with a kernel, whose gradient is left for later.

    Args:
        x: tensor [rows, inputs].
        kernel: variable [*inputs, *outputs].
        num_inputs: number of dimensions that are summed over.

    Returns:
        A tensor [rows, outputs].

    Raises:
        ValueError: the kernel is multiplied with for the second time.
    """
    inputs = _inputs.get()
    if kernel.path in inputs:
        raise ValueError(
            f"{kernel.path} is multiplied with more than once in a forward pass, and the schedule "
            "computes the gradients of weights apart: use pipeline_schedule='1f1b'"
        )
    inputs[kernel.path] = x

    matrix = tf.reshape(tf.cast(kernel, x.dtype), [math.prod(kernel.shape[:num_inputs]), -1])

    @tf.custom_gradient
    def multiply(x, handle):
        del handle  # other than of a tensor, the gradient of a variable may have any shape
        return tf.matmul(x, matrix), lambda dy: (tf.matmul(dy, matrix, transpose_b=True), dy)

    return multiply(x, trained_value(kernel).handle)


def kernel_gradients(pairs: list[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    """Return the gradients of kernels, [inputs, outputs] each, from their two factors.

    Args:
        pairs: list of (x [rows, inputs], gradient of the output [rows, outputs]).
    """
    gradients = [tf.matmul(x, tf.cast(dy, x.dtype), transpose_a=True) for x, dy in pairs]
    return [tf.cast(gradient, dy.dtype) for gradient, (_, dy) in zip(gradients, pairs)]
