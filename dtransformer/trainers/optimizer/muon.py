"""Muon optimizer: orthogonalized momentum for hidden matrices, AdamW for all other weights."""

import math
import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtransformer.layers.base import register

# Coefficients of the quintic polynomial (Jordan et al., 2024).
_A = 3.4445
_B = -4.7750
_C = 2.0315
_MIN_NORM = 1e-7
_SCALES = {
    "original": lambda inputs, outputs: math.sqrt(max(1, outputs / inputs)),
    "match_rms_adamw": lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),
}
_ARGUMENTS = (
    *("momentum", "nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn", "exclude"),
    *("adam_lr_ratio", "adam_beta_1", "adam_beta_2", "epsilon"),
)


@register
class Muon(keras.optimizers.Optimizer):
    """Optimizer that orthogonalizes the momentum of hidden matrices and updates the rest with AdamW.

    A Newton–Schulz iteration replaces the singular values of the momentum with values near 1. In
    contrast to `keras.optimizers.Muon`, kernels of attention and experts are matrices, too:

    | weight | matrix |
    |---|---|
    | kernel of a layer of this library | inputs × outputs, for example `[embed, heads * head_dim]` |
    | kernels of experts | one matrix for each expert |
    | 2-D weight `...kernel` of another layer | as stored |
    | embedding, head, router, norm, bias, adapter, weight in `exclude` | none: AdamW |

    Newton–Schulz needs full matrices. With `optimizer_shard` and on a mesh, set
    `optimizer_shard_partition="whole"`.

    References:
        - [Jordan et al., 2024](https://kellerjordan.github.io/posts/muon/)
        - [Liu et al., 2025](https://arxiv.org/abs/2502.16982)

    Args:
        learning_rate: Float, schedule or callable. Defaults to `0.001`.
        momentum: Float. Decay rate of the momentum of matrices. Defaults to `0.95`.
        nesterov: Boolean. Whether to use Nesterov momentum. Defaults to `True`.
        ns_steps: Integer. Number of Newton–Schulz steps. Defaults to `5`.
        ns_dtype: String. Dtype of the products of Newton–Schulz. `None` selects bfloat16 on GPUs and float32 on
            CPUs (default).
        adjust_lr_fn: `"match_rms_adamw"` (default) multiplies the update by
            `0.2 * sqrt(max(inputs, outputs))`, so that learning rates of AdamW fit. `"original"`
            multiplies it by `sqrt(max(1, outputs / inputs))`. Both as in `torch.optim.Muon`.
        exclude: String or list of strings. Regular expressions of the paths of matrices to update
            with AdamW, such as the last layer of a Keras model. Defaults to `()`.
        adam_lr_ratio: Float. Learning rate of AdamW divided by `learning_rate`. Defaults to `1.0`.
        adam_beta_1: Float. Decay rate of AdamW's first moment. Defaults to `0.9`.
        adam_beta_2: Float. Decay rate of AdamW's second moment. Defaults to `0.999`.
        epsilon: Float. Epsilon of AdamW. Defaults to `1e-7`.
        weight_decay: Float. Decoupled weight decay of all weights, multiplied by the learning rate
            of the weight. Defaults to `0.004`.
        **kwargs: Other arguments of `keras.optimizers.Optimizer`, such as `global_clipnorm`.

    Raises:
        ValueError: If `adjust_lr_fn` is unknown.

    Example:

    >>> optimizer = Muon(2e-3, weight_decay=0.1, adam_lr_ratio=0.5)
    >>> optimizer.matrix_shape(keras.Variable(tf.zeros((8, 4)), name="kernel"))
    (8, 4)
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Callable = 0.001,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: str | None = None,
        adjust_lr_fn: str = "match_rms_adamw",
        exclude: str | Sequence[str] = (),
        adam_lr_ratio: float = 1.0,
        adam_beta_1: float = 0.9,
        adam_beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = 0.004,
        name: str = "muon",
        **kwargs,
    ):
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        if adjust_lr_fn not in _SCALES:
            raise ValueError(
                f"`adjust_lr_fn` must be one of {', '.join(_SCALES)}, got {adjust_lr_fn!r}."
            )
        self.momentum = momentum
        self.nesterov = nesterov
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype
        self.adjust_lr_fn = adjust_lr_fn
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self.adam_lr_ratio = adam_lr_ratio
        self.adam_beta_1 = adam_beta_1
        self.adam_beta_2 = adam_beta_2
        self.epsilon = epsilon

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
        if any(re.search(pattern, weight.path) for pattern in self.exclude):
            return None
        return _matrix_shape(weight)

    def build(self, variables: list) -> None:
        if self.built:
            return
        super().build(variables)
        self._matrix_shapes = [self.matrix_shape(variable) for variable in variables]
        self.momentums = []
        self.velocities = []
        for variable, shape in zip(variables, self._matrix_shapes):
            velocity = None
            if shape is None:
                velocity = self.add_variable_from_reference(variable, name="velocity")
            self.momentums.append(self.add_variable_from_reference(variable, name="momentum"))
            self.velocities.append(velocity)

    def update_step(self, gradient, variable, learning_rate) -> None:
        index = self._get_variable_index(variable)
        shape = self._matrix_shapes[index]
        rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        momentum = self.momentums[index]
        if shape is None:
            rate *= self.adam_lr_ratio
            update = self._adam_update(gradient, momentum, self.velocities[index])
        else:
            dtype = self.ns_dtype or ("bfloat16" if "GPU" in variable.device else "float32")
            update = self._matrix_update(gradient, momentum, shape, dtype)
        if self.weight_decay and self._use_weight_decay(variable):
            update += self.weight_decay * tf.convert_to_tensor(variable)
        self.assign_sub(variable, rate * update)

    def _matrix_update(self, gradient, momentum, shape, dtype):
        self.assign(momentum, self.momentum * momentum + gradient)
        direction = momentum
        if self.nesterov:
            direction = gradient + self.momentum * momentum
        matrix = tf.reshape(direction, shape)
        matrix = tf.cast(orthogonalize(matrix, self.ns_steps, dtype), gradient.dtype)
        scale = _SCALES[self.adjust_lr_fn](*shape[-2:])
        return scale * tf.reshape(matrix, gradient.shape)

    def _adam_update(self, gradient, momentum, velocity):
        step = tf.cast(self.iterations + 1, gradient.dtype)
        self.assign_add(momentum, (gradient - momentum) * (1 - self.adam_beta_1))
        self.assign_add(velocity, (tf.square(gradient) - velocity) * (1 - self.adam_beta_2))
        correction = tf.sqrt(1 - self.adam_beta_2**step) / (1 - self.adam_beta_1**step)
        return correction * momentum / (tf.sqrt(velocity) + self.epsilon)

    def _apply_weight_decay(self, variables):
        """Do nothing, because `update_step` decays each weight with its own learning rate."""

    def get_config(self) -> dict:
        config = super().get_config()
        return {**config, **{name: getattr(self, name) for name in _ARGUMENTS}}


def orthogonalize(matrices: tf.Tensor, num_steps: int = 5, dtype: str = "float32") -> tf.Tensor:
    """Replace the singular values of matrices with values near 1 by Newton–Schulz.

    Args:
        matrices: Float tensor of shape `[..., inputs, outputs]`.
        num_steps: Integer. Number of steps. Defaults to `5`.
        dtype: String. Dtype of the products. Sums are float32. Defaults to `"float32"`.

    Returns:
        A float32 tensor of shape `[..., inputs, outputs]`.
    """

    def product(a, b, **options):
        result = tf.matmul(tf.cast(a, dtype), tf.cast(b, dtype), **options)
        return tf.cast(result, "float32")

    matrices = tf.cast(matrices, "float32")
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    norms = tf.norm(matrices, axis=(-2, -1), keepdims=True)
    x = matrices / tf.maximum(norms, _MIN_NORM)
    for _ in range(num_steps):
        # The smaller of x xᵀ and xᵀ x.
        gram = product(x, x, transpose_a=is_tall, transpose_b=not is_tall)
        polynomial = _B * gram + _C * product(gram, gram)
        x = _A * x + (product(x, polynomial) if is_tall else product(polynomial, x))
    return x


def _matrix_shape(weight):
    """Return the shape of a weight as a matrix or a list of matrices, or `None`."""
    shape = tuple(weight.shape)
    axes = getattr(weight, "logical_axes", None)
    if axes is None:
        is_kernel = len(shape) == 2 and weight.name.endswith("kernel")
        return shape if is_kernel else None
    if "vocab" in axes or getattr(weight, "is_head", False):
        return None
    num_inputs = getattr(weight, "num_inputs", None)
    if num_inputs is not None:
        return math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
    return shape if axes[0] == "expert" and len(shape) == 3 else None
