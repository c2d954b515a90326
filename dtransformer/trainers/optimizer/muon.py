"""Muon optimizer for hidden matrices with any number of dimensions."""

import math
import re

import keras
import tensorflow as tf

from dtransformer.layers.base import register

_MIN_NORM = 1e-7


@register
class Muon(keras.optimizers.Muon):
    """Optimizer that orthogonalizes the momentum of hidden matrices and updates the rest with AdamW.

    A Newton–Schulz iteration replaces the singular values of the momentum with values near 1. In
    contrast to `keras.optimizers.Muon`, kernels of attention and experts are also matrices:

    | weight | matrix |
    |---|---|
    | kernel of a layer of this library | inputs × outputs, for example `[embed, heads * head_dim]` |
    | kernels of experts | one matrix for each expert |
    | 2-D weight of another layer, except embeddings and biases | as stored |
    | embedding, head, router, norm, bias, adapter, weight in `exclude_layers` | none: AdamW |

    Newton–Schulz needs full matrices. With `optimizer_shard` and on a mesh, set
    `optimizer_shard_partition="whole"`. Its products are bfloat16 on GPUs and float32 on CPUs.

    Args lists the main arguments of `keras.optimizers.Muon`. The others also work.

    References:
        - [Jordan et al., 2024](https://kellerjordan.github.io/posts/muon/)
        - [Liu et al., 2025](https://arxiv.org/abs/2502.16982)

    Args:
        learning_rate: Float, schedule or callable. Defaults to `0.001`.
        weight_decay: Float. Decoupled weight decay of matrices. Defaults to `0.004`.
        exclude_layers: List of strings. Regular expressions of the paths of matrices to update with
            AdamW, such as the last layer of a Keras model. Defaults to `None`.
        adam_lr_ratio: Float. Learning rate of AdamW divided by `learning_rate`. Defaults to `1`.
        adam_weight_decay: Float. Decoupled weight decay of AdamW, multiplied by `learning_rate`.
            Defaults to `0.004`.
        momentum: Float. Decay rate of the momentum of matrices. Defaults to `0.95`.
        nesterov: Boolean. Whether to use Nesterov momentum. Defaults to `True`.
        ns_steps: Integer. Number of Newton–Schulz steps. Defaults to `5`.
        rms_rate: Float. Multiplies updates by `rms_rate * sqrt(max(inputs, outputs))`. The default
            `0.2` fits learning rates of AdamW, as `adjust_lr_fn="match_rms_adamw"` of
            `torch.optim.Muon`. `None` multiplies them by `sqrt(max(1, outputs / inputs))`, as
            `adjust_lr_fn="original"`.

    Example:

    >>> optimizer = Muon(2e-3, weight_decay=0.1, adam_lr_ratio=0.5)
    >>> optimizer.matrix_shape(keras.Variable(tf.zeros((8, 4)), name="kernel"))
    (8, 4)
    """

    def matrix_shape(self, parameter: keras.Variable) -> tuple[int, ...] | None:
        """Return the shape of a parameter as a matrix, or `None` if AdamW updates it.

        Args:
            parameter: Keras variable, or a `ParameterProxy` for a full weight.

        Returns:
            A tuple `(inputs, outputs)`, or `(experts, inputs, outputs)` for kernels of experts.
        """
        weight = getattr(parameter, "weight", parameter)
        group = getattr(weight, "update_group", None)
        if group is not None and group.uses_adamw:
            return None
        if any(re.search(pattern, weight.path) for pattern in self.exclude_layers):
            return None
        if hasattr(weight, "logical_axes"):
            return _matrix_shape(weight)
        uses_adamw = super()._should_use_adamw(weight) or "bias" in weight.name
        return None if uses_adamw else tuple(weight.shape)

    def build(self, variables: list) -> None:
        super().build(variables)
        self._matrix_shapes = [self.matrix_shape(variable) for variable in variables]

    def _should_use_adamw(self, variable):
        return self.matrix_shape(variable) is None

    def _muon_update_step(self, gradient, variable, learning_rate, momentum):
        shape = self._matrix_shapes[self._get_variable_index(variable)]
        self.assign(momentum, self.momentum * momentum + gradient)
        direction = momentum
        if self.nesterov:
            direction = gradient + self.momentum * momentum
        matrix = self.zeropower_via_newtonschulz5(
            tf.reshape(direction, shape),
            self.ns_steps,
            "bfloat16" if "GPU" in variable.device else "float32",
        )
        inputs, outputs = shape[-2:]
        if self.rms_rate is None:
            scale = math.sqrt(max(1, outputs / inputs))
        else:
            scale = self.rms_rate * math.sqrt(max(inputs, outputs))
        self.assign_sub(variable, learning_rate * scale * tf.reshape(matrix, variable.shape))

    def zeropower_via_newtonschulz5(
        self, x: tf.Tensor, steps: int, dtype: str = "float32"
    ) -> tf.Tensor:
        """Replace the singular values of matrices with values near 1 by Newton–Schulz.

        Args:
            x: Float tensor of shape `[..., inputs, outputs]`.
            steps: Integer. Number of steps.
            dtype: String. Dtype of the products. Sums are float32. Defaults to `"float32"`.

        Returns:
            A float32 tensor of shape `[..., inputs, outputs]`.
        """

        def product(a, b, **options):
            result = tf.matmul(tf.cast(a, dtype), tf.cast(b, dtype), **options)
            return tf.cast(result, "float32")

        is_tall = x.shape[-2] > x.shape[-1]
        x = tf.cast(x, "float32")
        x /= tf.maximum(tf.norm(x, axis=(-2, -1), keepdims=True), _MIN_NORM)
        for _ in range(steps):
            # The smaller of x xᵀ and xᵀ x.
            gram = product(x, x, transpose_a=is_tall, transpose_b=not is_tall)
            polynomial = self.muon_b * gram + self.muon_c * product(gram, gram)
            x = self.muon_a * x + (product(x, polynomial) if is_tall else product(polynomial, x))
        return x


def _matrix_shape(weight):
    """Return the shape of a weight with logical axes as a matrix or as matrices, or `None`."""
    axes = weight.logical_axes
    shape = tuple(weight.shape)
    if "vocab" in axes or hasattr(weight, "is_head"):
        return None
    if hasattr(weight, "num_inputs"):
        return math.prod(shape[: weight.num_inputs]), math.prod(shape[weight.num_inputs :])
    return shape if axes[0] == "expert" and len(shape) == 3 else None
