"""A dense layer, cut by columns or by rows."""

import tensorflow as tf

from dtransformer.layers.base import Layer, check_divisible, check_size, register
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.tensor_parallel.linear import (
    column_parallel,
    matmul,
    row_parallel,
)
from dtransformer.parallel.trace import is_on_mesh

_CUTS = ("column", "row", None)


@register
class Linear(Layer):
    """Multiply with a kernel and add a bias.

    A column-parallel kernel is cut along its outputs, a row-parallel one along its
    inputs; a column-parallel layer followed by a row-parallel one needs one
    all-reduce for both (Shoeybi et al., 2019, "Megatron-LM", arXiv 1909.08053).

    Args:
        units: size of the output.
        use_bias: whether to add a bias.
        parallel: `"column"`, `"row"`, or None for a kernel that is never cut.
        kernel_initializer: a Keras initializer, or its name.
        bias_initializer: a Keras initializer, or its name.

    Input shape:
        [..., inputs]

    Output shape:
        [..., units]
    """

    def __init__(
        self,
        units,
        use_bias=True,
        parallel="column",
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if parallel not in _CUTS:
            raise ValueError(f"parallel must be 'column', 'row' or None, got {parallel!r}")
        self.units = check_size("units", units)
        self.use_bias = use_bias
        self.parallel = parallel
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape):
        inputs = input_shape[-1]
        if self.parallel == "column":
            check_divisible(units=self.units)
        elif self.parallel == "row":
            check_divisible(inputs=inputs)
        cut_inputs = "mlp" if self.parallel == "row" else None
        cut_outputs = "mlp" if self.parallel == "column" else None
        self.kernel = self.add_weight(
            (inputs, self.units),
            self.kernel_initializer,
            axes=(cut_inputs, cut_outputs),
            name="kernel",
        )
        if self.use_bias:
            self.bias = self.add_weight(
                (self.units,), self.bias_initializer, axes=(cut_outputs,), name="bias"
            )
        self.built = True

    def call(self, inputs):
        y = self._product(inputs) if is_on_mesh() else matmul(inputs, self.kernel)
        return y + self.bias if self.use_bias else y

    def _product(self, inputs):
        """The product on the mesh, which has one dimension between batch and features."""
        *leading, features = static_or_dynamic_shape(inputs)
        x = tf.reshape(inputs, [leading[0], -1, features])
        if self.parallel == "row":
            y = row_parallel(x, self.kernel, ("mlp",))
        else:
            axes = ("mlp" if self.parallel == "column" else None,)
            (y,) = column_parallel(x, [self.kernel], axes)
        return tf.reshape(y, [*leading, self.units])

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "use_bias": self.use_bias,
            "parallel": self.parallel,
            "kernel_initializer": self.kernel_initializer,
            "bias_initializer": self.bias_initializer,
        }
