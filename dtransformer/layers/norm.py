"""Layer normalization and root-mean-square normalization, computed in float32."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.features import mean_of_features, sum_to_features
from dtransformer.parallel.recompute import recomputed


class _Norm(Layer):
    """What both share: a gain for every feature and the type to compute in."""

    def __init__(self, epsilon, compute_type="float32", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.epsilon = epsilon
        self.compute_type = compute_type

    def build(self, input_shape):
        self.takes(input_shape[-1])
        self.gamma = self.add_weight(
            (input_shape[-1],), "ones", axes=("norm",), name="gamma", autocast=False
        )
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        compute = lambda x: tf.cast(
            self.normalize(tf.cast(x, self.compute_type)), self.compute_dtype
        )
        return recomputed(compute, [inputs], self.variables) if self.recomputes else compute(inputs)

    def normalize(self, x):
        raise NotImplementedError

    def weight(self, variable):
        return tf.cast(variable, self.compute_type)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "epsilon": self.epsilon,
            "compute_type": self.compute_type,
        }


@register
class LayerNorm(_Norm):
    """Normalize the last dimension to mean 0 and variance 1, then scale and shift.

    Reference: Ba et al., 2016, "Layer normalization", arXiv 1607.06450.

    Args:
        epsilon: added to the variance.
        compute_type: type to compute in; the result has the layer's compute type.

    Input shape:
        [..., h]

    Output shape:
        [..., h]
    """

    def __init__(self, epsilon: float = 1e-5, compute_type: str = "float32", **kwargs):
        super().__init__(epsilon, compute_type, **kwargs)

    def build(self, input_shape: tuple) -> None:
        super().build(input_shape)
        self.beta = self.add_weight(
            (input_shape[-1],), "zeros", axes=("norm",), name="beta", autocast=False
        )

    def normalize(self, x: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def layer_norm(x, gamma, beta):
            mean = mean_of_features(x)
            unit, inverse = _divide_by_rms(x - mean, self.epsilon)
            unit_again = _unit_again(unit, x, inverse, mean)

            def gradient(dy):
                dx, dgamma = _rms_gradient(dy, unit_again(), gamma)
                dx = (dx - mean_of_features(dy, gamma)) * inverse
                return dx, dgamma, sum_to_features(dy)

            return unit * gamma + beta, gradient

        return layer_norm(x, self.weight(self.gamma), self.weight(self.beta))


@register
class RMSNorm(_Norm):
    """Divide the last dimension by its root mean square, then scale.

    Reference: Zhang and Sennrich, 2019, "Root mean square layer normalization",
    arXiv 1910.07467.

    Args:
        epsilon: added to the mean square.
        compute_type: type to compute in; the result has the layer's compute type.

    Input shape:
        [..., h]

    Output shape:
        [..., h]
    """

    def __init__(self, epsilon: float = 1e-6, compute_type: str = "float32", **kwargs):
        super().__init__(epsilon, compute_type, **kwargs)

    def normalize(self, x: tf.Tensor) -> tf.Tensor:
        @custom_gradient
        def rms_norm(x, gamma):
            unit, inverse = _divide_by_rms(x, self.epsilon)
            unit_again = _unit_again(unit, x, inverse)

            def gradient(dy):
                dx, dgamma = _rms_gradient(dy, unit_again(), gamma)
                return dx * inverse, dgamma

            return unit * gamma, gradient

        return rms_norm(x, self.weight(self.gamma))


# The gradients are written by hand: a third fewer passes over the activations than through
# each step of the computation, of which only the result `unit` is kept.


def _divide_by_rms(x, epsilon):
    """Return x over its root mean square, and the reciprocal of that [..., 1]."""
    mean_square = mean_of_features(tf.square(x))
    inverse = tf.math.rsqrt(mean_square + epsilon)
    return x * inverse, inverse


def _unit_again(unit, x, inverse, mean=None):
    """Return a function that gives `unit` in the backward pass.

    XLA is given the numbers of each row, so that it need not compute them in each kernel.
    """
    if not _compat.is_compiled_by_xla():
        return lambda: unit

    def again():
        own = _compat.barrier([inverse] if mean is None else [inverse, mean])
        return (x if mean is None else x - own[1]) * own[0]

    return again


def _rms_gradient(dy, unit, gamma):
    """Return the gradient of x, times its root mean square, and that of gamma."""
    product = dy * unit
    dx = dy * gamma - unit * mean_of_features(product, gamma)
    return dx, sum_to_features(product)


_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


def make_norm(kind: str = "layer_norm", epsilon: float | None = None, **kwargs) -> _Norm:
    """Return a norm by its name, `"layer_norm"` or `"rms_norm"`.

    Args:
        kind: the name.
        epsilon: the norm's own default where it is None.
        **kwargs: other arguments of the norm.

    Raises:
        ValueError: the name is unknown.
    """
    if kind not in _NORMS:
        raise ValueError(f"norm must be one of {', '.join(_NORMS)}, got {kind!r}")
    return _NORMS[kind](**({} if epsilon is None else {"epsilon": epsilon}), **kwargs)
