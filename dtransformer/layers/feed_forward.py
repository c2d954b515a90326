"""Feed-forward layer of a Transformer block."""

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.activations import (
    XIELU_WEIGHTS,
    gated_product,
    get_activation,
    needs_gate,
    xielu,
)
from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import StreamLayer, check_divisible, check_rate, register
from dtransformer.layers.dropout import Dropout
from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.tensor_parallel.linear import column_parallel, row_parallel


@register
class FeedForward(StreamLayer):
    """Two dense layers with an activation between them.

    The first dense layer (mapping) is column-parallel, the second (projection) is row-parallel, and
    its bias is added after the reduction.

    References:

    - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.3
    - [Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053) (Megatron-LM), section 3
    - [Shazeer, 2020](https://arxiv.org/abs/2002.05202), for the gated form

    Args:
        hidden_size: Integer. Size h of the input and the output.
        ffn_hidden_size: Integer. Size f of the inner activations.
        dropout_rate: Float in [0, 1). Dropout of the output. Defaults to `0.1`.
        hidden_act: Name of an activation, a callable, or a Keras layer class. Defaults to `"gelu"`.
        expert_num: Integer. Must be 1; use `MoE` for several experts. Defaults to `1`.
        kernel_initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.
        gated: Boolean, whether the mapping is multiplied by the activation of a second dense layer
            (gate). With `hidden_act="silu"` this is SwiGLU. Defaults to `False`.
        use_bias: Boolean, whether the dense layers have a bias. Defaults to `True`.

    Input shape:
        `[b, s, h]`

    Output shape:
        `[b, s, h]`

    Raises:
        ValueError: If `hidden_act` needs a gate and `gated` is `False`, or `hidden_act` is
            `"xielu"` and `gated` is `True`, `expert_num` is not 1, or `model_parallel` does not
            divide a size.

    Example:

    >>> FeedForward(8, 32)(tf.zeros((2, 3, 8))).shape
    TensorShape([2, 3, 8])
    """

    has_experts = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        dropout_rate: float = 0.1,
        hidden_act: str | Callable = "gelu",
        expert_num: int = 1,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        gated: bool = False,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_size = check_int("hidden_size", hidden_size)
        self.require_features(hidden_size)
        self.ffn_hidden_size = check_int("ffn_hidden_size", ffn_hidden_size)
        self.dropout_rate = check_rate("dropout_rate", dropout_rate)
        self.hidden_act = hidden_act
        self.activation = get_activation(hidden_act, allow_weights=not self.has_experts)
        if needs_gate(self.activation) and not gated:
            raise ValueError(f"`hidden_act={hidden_act!r}` requires `gated=True`.")
        if self.activation is xielu and gated:
            raise ValueError("`hidden_act='xielu'` requires `gated=False`.")
        if check_int("expert_num", expert_num) != 1:
            raise ValueError(
                f"`expert_num={expert_num}` must be 1. Use `layers.MoE` for several experts."
            )
        self.expert_num = expert_num
        self.kernel_initializer = kernel_initializer
        self.gated = gated
        self.use_bias = use_bias
        check_divisible(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def add_dense(self, initializer: keras.initializers.Initializer | str, *experts: int) -> None:
        """Add the kernels and biases.

        Args:
            initializer: Keras initializer or its name.
            *experts: Number of experts, which becomes the first dimension of all weights. Omit it
                for a single layer.
        """
        h = self.hidden_size
        f = self.ffn_hidden_size
        expert_axes = ("expert",) * len(experts)
        dense = {"mapping": (h, f, "embed", "mlp")}
        if self.gated:
            dense["gate"] = dense["mapping"]
        dense["projection"] = (f, h, "mlp", "embed")
        for name, (size, new_size, axis, new_axis) in dense.items():
            kernel = self.add_weight(
                (*experts, size, new_size),
                initializer,
                axes=(*expert_axes, axis, new_axis),
                name=f"{name}_kernel",
                num_inputs=1,
                num_stacked=len(experts),
            )
            setattr(self, f"{name}_kernel", kernel)
            if self.use_bias:
                axes = (*expert_axes, new_axis)
                bias = self.add_weight(
                    (*experts, new_size), "zeros", axes=axes, name=f"{name}_bias"
                )
                setattr(self, f"{name}_bias", bias)

    def build(self, input_shape: tuple) -> None:
        self.add_dense(self.kernel_initializer)
        if self.activation is xielu:
            for name, value in XIELU_WEIGHTS.items():
                initializer = keras.initializers.Constant(value)
                setattr(self, name, self.add_weight((1,), initializer, axes=(None,), name=name))
        self.dropout.build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        check_floating("inputs", inputs)
        # [batch, length, embed] -> [batch, length, mlp]
        kernels = [self.mapping_kernel, self.gate_kernel] if self.gated else [self.mapping_kernel]
        x, *gate = column_parallel(inputs, kernels, ("mlp",))
        if self.use_bias:
            x = add_bias(x, self.mapping_bias)
            gate = [add_bias(y, self.gate_bias) for y in gate]
        if self.activation is xielu:
            x = xielu(x, self.xielu_alpha_p, self.xielu_alpha_n)
        else:
            x = gated_product(self.activation, gate[0], x) if self.gated else self.activation(x)
        # [batch, length, mlp] -> [batch, length, embed]
        x = row_parallel(x, self.projection_kernel, ("mlp",))
        if self.use_bias:
            x = add_bias(x, self.projection_bias)
        return self.dropout(x, training=training)
