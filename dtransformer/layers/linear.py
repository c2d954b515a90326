"""Dense layer, sharded by columns or by rows."""

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import Layer, check_divisible, register
from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.tensor_parallel.linear import column_parallel, row_parallel

_PARALLEL = ("column", "row", None)


@register
class Linear(Layer):
    """Dense layer with a column-parallel, row-parallel or replicated kernel.

    A column-parallel kernel is sharded along its outputs, a row-parallel kernel along its inputs. A
    column-parallel layer followed by a row-parallel layer needs one all-reduce for both.

    Reference: [Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053) (Megatron-LM)

    Args:
        units: Integer. Size of the output.
        use_bias: Boolean, whether to add a bias. Defaults to `True`.
        parallel: `"column"`, `"row"`, or `None` for a kernel that is never sharded. Defaults to
            `"column"`.
        kernel_initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.
        bias_initializer: Keras initializer or its name. Defaults to `"zeros"`.

    Input shape:
        `[..., inputs]`

    Output shape:
        `[..., units]`

    Raises:
        ValueError: If `parallel` is unknown, or `model_parallel` does not divide the sharded
            dimension.
    """

    def __init__(
        self,
        units: int,
        use_bias: bool = True,
        parallel: str | None = "column",
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        bias_initializer: str | keras.initializers.Initializer = "zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        if parallel not in _PARALLEL:
            raise ValueError(f"`parallel` must be 'column', 'row' or None, got {parallel!r}.")
        self.units = check_int("units", units)
        self.use_bias = use_bias
        self.parallel = parallel
        self.kernel_initializer = kernel_initializer
        self.bias_initializer = bias_initializer

    def build(self, input_shape: tuple) -> None:
        inputs = input_shape[-1]
        self.require_features(inputs)
        if self.parallel == "column":
            check_divisible(units=self.units)
        elif self.parallel == "row":
            check_divisible(inputs=inputs)
        self.inputs_axis = "mlp" if self.parallel == "row" else None
        self.units_axis = "mlp" if self.parallel == "column" else None
        self.kernel = self.add_weight(
            (inputs, self.units),
            self.kernel_initializer,
            axes=(self.inputs_axis, self.units_axis),
            name="kernel",
            num_inputs=1,
        )
        if self.use_bias:
            self.bias = self.add_weight(
                (self.units,), self.bias_initializer, axes=(self.units_axis,), name="bias"
            )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        check_floating("inputs", inputs)
        # [..., inputs] -> [..., units]
        if self.parallel == "row":
            y = row_parallel(inputs, self.kernel, (self.inputs_axis,))
        else:
            (y,) = column_parallel(inputs, [self.kernel], (self.units_axis,))
        return add_bias(y, self.bias) if self.use_bias else y

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape[:-1], self.units)
