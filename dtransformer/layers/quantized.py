"""Quantized kernels of layers: creation from initial or stored values, and replacement."""

import functools
import types
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.block_quantization import BlockLayout, quantize
from dtransformer.parallel.pipeline_parallel import stage_weights
from dtransformer.parallel.tensor_parallel.quantized_kernel import QuantizedKernel
from dtransformer.parallel.variable_factory import quantization, with_stored_value
from dtransformer.parallel.weights.shard_bounds import get_shape
from dtransformer.parallel.weights.sharded_variable import StoredValue


class QuantizedMixin(keras.layers.Layer):
    """Mixin of layers whose kernels can be stored in a quantized format.

    The codes and scales of a kernel are non-trainable weights of the layer. Subclasses need an
    `add_weight` with logical axes.
    """

    # Name of a kernel -> format. Configs store it.
    quantized = types.MappingProxyType({})
    quantized_kernels = types.MappingProxyType({})

    def select_format(self, name: str, path: str) -> str | None:
        """Return the format of a new kernel, or `None` for a kernel that is not quantized."""
        select = quantization.get()
        return self.quantized.get(name) if select is None else select(path)

    def add_quantized(
        self,
        layout: BlockLayout,
        initializer: Callable,
        name: str,
        path: str,
        axes: tuple,
        true_shape: tuple[int, ...] | None,
    ) -> QuantizedKernel:
        """Add the stored parts of a quantized kernel.

        Each rank quantizes only its shards. No rank stores the kernel in full precision.

        Args:
            layout: `BlockLayout` of the kernel.
            initializer: Function of `(shape, dtype)` that returns the kernel.
            name: Name of the kernel.
            path: Path of the kernel.
            axes: Tuple with the logical axis of each dimension, or `None`.
            true_shape: Shape without padding. `None` for the full shape.
        """
        initializer = with_stored_value(initializer, path)

        @functools.cache
        def quantized_rectangle(bounds):
            with tf.device("CPU:0"):
                if isinstance(initializer, StoredValue):
                    value = initializer.rectangle(bounds, "float32")
                else:
                    value = initializer(layout.shape, "float32")
                    value = np.asarray(value)[tuple(slice(*ends) for ends in bounds)]
            return quantize(layout.with_shape(get_shape(bounds)), np.asarray(value))

        def read(part, bounds, dtype):
            kernel_bounds, slices = layout.rectangle(part, bounds)
            return quantized_rectangle(kernel_bounds)[part][slices]

        part_axes = layout.part_axes(axes)
        parts = {
            part: self.add_weight(
                shape,
                StoredValue(functools.partial(read, part)),
                axes=part_axes[part],
                name=f"{name}_{part}",
                dtype="uint8" if part in ("codes", "absmax") else "float32",
                trainable=False,
                autocast=False,
            )
            for part, shape in layout.part_shapes.items()
        }
        kernel = QuantizedKernel(layout, parts, name, path, axes, true_shape or layout.shape)
        self.quantized = {**self.quantized, name: layout.kind}
        self.quantized_kernels = {**self.quantized_kernels, name: kernel}
        return kernel

    @stage_weights.built_on_its_stage
    def replace_quantized(self, name: str, value: np.ndarray | None) -> None:
        """Replace a quantized kernel by an ordinary frozen weight.

        Args:
            name: Name of the kernel.
            value: Full value of the weight. `None` on ranks of other pipeline stages.
        """
        kernel = self.quantized_kernels[name]
        self.quantized = {key: kind for key, kind in self.quantized.items() if key != name}
        self.quantized_kernels = {
            key: other for key, other in self.quantized_kernels.items() if key != name
        }
        for part in kernel.parts.values():
            stage_weights.forget_weight(self, part)
        _compat.unlock_layer(self)
        weight = self.add_weight(
            kernel.layout.shape,
            lambda shape, dtype: tf.constant(value, dtype),
            axes=kernel.logical_axes,
            name=name,
            num_inputs=kernel.num_inputs,
            true_shape=kernel.true_shape,
        )
        weight.trainable = False
        for attribute in [key for key, x in vars(self).items() if x is kernel]:
            setattr(self, attribute, weight)
