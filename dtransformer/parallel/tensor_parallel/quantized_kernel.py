"""Frozen kernels in a quantized format, and products with them.

A product dequantizes its kernel in the forward pass and again in the backward pass. In between,
only the codes and scales are in memory.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.mesh.axis_rules import current_overrides, override_rules
from dtransformer.parallel.ops import block_quantization
from dtransformer.parallel.ops.custom_gradient import custom_gradient


class QuantizedKernel:
    """Frozen kernel of a layer. It replaces the variable in products.

    The layer's weights contain the stored parts instead of the kernel. TensorFlow functions accept
    the kernel as a float32 tensor.

    Args:
        layout: `BlockLayout`.
        parts: Dict from the names in `layout.part_shapes` to non-trainable Keras variables.
        name: Name of the kernel in its layer.
        path: Path of the kernel in the network.
        axes: Tuple with the logical axis of each dimension, or `None`.
        true_shape: Shape without padding.
    """

    trainable = False
    dtype = "float32"

    def __init__(
        self,
        layout: block_quantization.BlockLayout,
        parts: dict[str, keras.Variable],
        name: str,
        path: str,
        axes: tuple,
        true_shape: tuple[int, ...],
    ):
        self.layout = layout
        self.parts = parts
        self.name = name
        self.path = path
        self.logical_axes = axes
        self.true_shape = true_shape
        self.shape = tf.TensorShape(layout.shape)

    def values(self) -> dict[str, tf.Tensor]:
        """Return the values of the stored parts, by name."""
        return {name: tf.convert_to_tensor(part) for name, part in self.parts.items()}

    def numpy(self) -> np.ndarray:
        """Return the dequantized full kernel. All ranks with a part of it must call together."""
        parts = {name: tf.constant(part.numpy()) for name, part in self.parts.items()}
        with tf.device("CPU:0"):
            return block_quantization.dequantize(self.layout, parts).numpy()

    def __tf_tensor__(self, dtype=None, name=None):
        return block_quantization.dequantize(self.layout, self.values(), dtype or "float32")


def is_quantized(kernel) -> bool:
    """Return whether a kernel is a `QuantizedKernel`."""
    return isinstance(kernel, QuantizedKernel)


def get_quantized_kernels(layer: keras.layers.Layer) -> list[QuantizedKernel]:
    """Return the quantized kernels of a layer and its sublayers whose parts this rank stores."""
    by_codes = {
        id(kernel.parts["codes"]): kernel
        for sublayer in _compat.flat_layers(layer)
        for kernel in getattr(sublayer, "quantized_kernels", {}).values()
    }
    return [by_codes[id(variable)] for variable in layer.variables if id(variable) in by_codes]


def multiply_dequantized(
    multiply: Callable, xs: Sequence[tf.Tensor], kernels: Sequence[QuantizedKernel]
) -> list[tf.Tensor]:
    """Return `multiply(xs, kernels)` with dequantized kernels in the dtype of the inputs.

    The backward pass dequantizes the kernels again. Only the inputs have gradients.

    Args:
        multiply: Function of two lists of tensors that returns a list of tensors. It must be linear
            in `xs`.
        xs: Sequence of float tensors.
        kernels: Sequence of `QuantizedKernel`s.
    """
    overrides = current_overrides()
    parts = [kernel.values() for kernel in kernels]

    def dequantized(values, after=None):
        return [
            block_quantization.dequantize(kernel.layout, values_by_name, xs[0].dtype, after)
            for kernel, values_by_name in zip(kernels, tf.nest.pack_sequence_as(parts, values))
        ]

    @custom_gradient
    def product(*tensors):
        inputs = list(tensors[: len(xs)])
        values = tensors[len(xs) :]

        def gradient(*upstream):
            with override_rules(overrides), tf.GradientTape() as tape:
                tape.watch(inputs)
                # The tape never reads these products, so TensorFlow removes them.
                ys = multiply(inputs, dequantized(values, after=upstream[0]))
            gradients = tape.gradient(ys, inputs, list(upstream))
            return [*gradients, *([None] * len(values))]

        return multiply(inputs, dequantized(values)), gradient

    return product(*xs, *tf.nest.flatten(parts))
