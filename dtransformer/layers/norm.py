"""Layer normalization and root-mean-square normalization, by default in float32."""

import dataclasses

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.base import StreamLayer, register
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.feature_reductions import mean_over_features, sum_to_features


class _Norm(StreamLayer):
    """Base class of norms with a gain per feature and a compute type."""

    default_epsilon = 1e-5

    def __init__(
        self,
        epsilon: float | None = None,
        compute_type: str = "float32",
        unit_offset: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        epsilon = self.default_epsilon if epsilon is None else epsilon
        self.epsilon = epsilon
        self.unit_offset = unit_offset
        self.gain_initializer = "zeros" if unit_offset else "ones"
        self.compute_type = compute_type

    def build(self, input_shape):
        self.require_features(input_shape[-1])
        self.gamma = self.add_weight(
            (input_shape[-1],), self.gain_initializer, axes=("norm",), name="gamma", autocast=False
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.normalize(tf.cast(inputs, self.compute_type)), self.compute_dtype)

    def normalize(self, x):
        raise NotImplementedError

    def weight(self, variable: keras.Variable) -> tf.Tensor:
        return tf.cast(variable, self.compute_type)

    def gain(self) -> tf.Tensor:
        return self.weight(self.gamma) + 1 if self.unit_offset else self.weight(self.gamma)


@register
class LayerNorm(_Norm):
    """Normalize the last dimension to mean 0 and variance 1, then scale and shift.

    Reference: [Ba et al., 2016](https://arxiv.org/abs/1607.06450)

    Args:
        epsilon: Float. Added to the variance. Defaults to `1e-5`.
        compute_type: Type to compute in. The output has the layer's compute type. Defaults to
            `"float32"`.
        use_beta: Boolean, whether to shift. Defaults to `True`.
        unit_offset: Boolean, whether the scale is 1 + gamma with gamma initialized to 0. Defaults
            to `False`.

    Input shape:
        `[..., h]`

    Output shape:
        `[..., h]`
    """

    def __init__(
        self,
        epsilon: float | None = None,
        compute_type: str = "float32",
        use_beta: bool = True,
        unit_offset: bool = False,
        **kwargs,
    ):
        super().__init__(epsilon, compute_type, unit_offset, **kwargs)
        self.use_beta = use_beta

    def build(self, input_shape: tuple) -> None:
        super().build(input_shape)
        if self.use_beta:
            self.beta = self.add_weight(
                (input_shape[-1],), "zeros", axes=("norm",), name="beta", autocast=False
            )

    def normalize(self, x: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def layer_norm(x, gamma, *beta):
            mean = mean_over_features(x)
            unit, inverse = _divide_by_rms(x - mean, self.epsilon)
            unit_again = _make_unit(unit, x, inverse, mean)

            def gradient(dy):
                dx, dgamma = _rms_gradient(dy, unit_again(), gamma)
                dx = (dx - mean_over_features(dy, gamma)) * inverse
                return dx, dgamma, *(sum_to_features(dy) for _ in beta)

            return unit * gamma + beta[0] if beta else unit * gamma, gradient

        beta = [self.weight(self.beta)] if self.use_beta else []
        return layer_norm(x, self.gain(), *beta)


@register
class RMSNorm(_Norm):
    """Divide the last dimension by its root mean square, then scale.

    Reference: [Zhang and Sennrich, 2019](https://arxiv.org/abs/1910.07467)

    Args:
        epsilon: Float. Added to the mean square. Defaults to `1e-6`.
        compute_type: Type to compute in. The output has the layer's compute type. Defaults to
            `"float32"`.
        unit_offset: Boolean, whether the scale is 1 + gamma with gamma initialized to 0, so weight
            decay pulls the scale towards 1, as in [Gemma](https://arxiv.org/abs/2403.08295).
            Defaults to `False`.

    Input shape:
        `[..., h]`

    Output shape:
        `[..., h]`
    """

    axes = -1
    default_epsilon = 1e-6

    def normalize(self, x: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def rms_norm(x, gamma):
            unit, inverse = _divide_by_rms(x, self.epsilon, self.axes)
            unit_again = _make_unit(unit, x, inverse)

            def gradient(dy):
                dx, dgamma = _rms_gradient(dy, unit_again(), gamma, self.axes)
                return dx * inverse, dgamma

            return unit * gamma, gradient

        return rms_norm(x, self.gain())


@register
class AllHeadsRMSNorm(RMSNorm):
    """Divide queries or keys by the root mean square over all heads, then scale.

    With sharded heads, devices exchange one float per position.

    Reference: [OLMo Team, 2025](https://arxiv.org/abs/2501.00656), section 3.1

    Args:
        epsilon, compute_type, unit_offset: See `RMSNorm`.

    Input shape:
        `[b, n, s, d]`

    Output shape:
        `[b, n, s, d]`
    """

    axes = (1, 3)

    def build(self, input_shape: tuple) -> None:
        shape = (input_shape[1], 1, input_shape[3])
        self.gamma = self.add_weight(
            shape,
            self.gain_initializer,
            axes=("heads", None, "head_dim"),
            name="gamma",
            autocast=False,
        )


# The gradients are written by hand. They read the activations a third fewer times than automatic
# gradients of the single steps, and store only the result `unit`.


def _divide_by_rms(x, epsilon, axes=-1):
    """Return x / rms(x) and 1 / rms(x), the latter with size 1 along `axes`."""
    mean_square = mean_over_features(tf.square(x), axes=axes)
    inverse = tf.math.rsqrt(mean_square + epsilon)
    return x * inverse, inverse


def _make_unit(unit, x, inverse, mean=None):
    """Return a function that returns `unit` in the backward pass.

    Under XLA it computes `unit` again from the row statistics, behind a barrier, so that each
    kernel need not compute the statistics.
    """
    if not _compat.is_compiled_by_xla():
        return lambda: unit

    def recompute():
        statistics = _compat.barrier([inverse] if mean is None else [inverse, mean])
        return (x if mean is None else x - statistics[1]) * statistics[0]

    return recompute


def _rms_gradient(dy, unit, gamma, axes=-1):
    """Return the gradient of x times its root mean square, and the gradient of gamma."""
    product = dy * unit
    dx = dy * gamma - unit * mean_over_features(product, gamma, axes)
    if axes == -1:
        return dx, sum_to_features(product)
    return dx, tf.reduce_sum(product, axis=(0, 2))[:, None, :]


# Name of a norm -> its class and options.
_NORMS = {
    "layer_norm": (LayerNorm, {}),
    "layer_norm_without_beta": (LayerNorm, {"use_beta": False}),
    "layer_norm_unit_offset": (LayerNorm, {"unit_offset": True}),
    "rms_norm": (RMSNorm, {}),
    "rms_norm_unit_offset": (RMSNorm, {"unit_offset": True}),
    "rms_norm_all_heads": (AllHeadsRMSNorm, {}),
}


def make_norm(kind: str = "layer_norm", epsilon: float | None = None, **kwargs) -> _Norm:
    """Return a norm by name.

    Args:
        kind: `"layer_norm"`, `"layer_norm_without_beta"`, `"layer_norm_unit_offset"`, `"rms_norm"`,
            `"rms_norm_unit_offset"`, or `"rms_norm_all_heads"` for queries and keys only. Defaults
            to `"layer_norm"`.
        epsilon: Float. Defaults to the norm's default.
        **kwargs: Other arguments of the norm.

    Raises:
        ValueError: If the name is unknown.
    """
    if kind not in _NORMS:
        raise ValueError(f"`norm` must be one of {', '.join(_NORMS)}, got {kind!r}.")
    norm, options = _NORMS[kind]
    return norm(epsilon, **options, **kwargs)


@dataclasses.dataclass(frozen=True)
class QKNorm:
    """Norm of each head's queries and keys.

    Reference: [Henry et al., 2020](https://arxiv.org/abs/2010.04245)

    Args:
        kind: Name of a norm, see `make_norm`. `"rms_norm_all_heads"` normalizes over all heads.
        epsilon: Float. Defaults to the norm's default.
        after_rotary: Boolean, whether the norm follows the rotary embedding, as in HunYuan.
            Defaults to `False`.
    """

    kind: str
    epsilon: float | None = None
    after_rotary: bool = False

    def make_layer(self, name: str, dtype: keras.DTypePolicy) -> _Norm:
        """Return a layer for queries or for keys."""
        return make_norm(self.kind, self.epsilon, dtype=dtype, name=name)
