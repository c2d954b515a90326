"""Layer normalization and root-mean-square normalization, computed in float32."""

import tensorflow as tf

from dtransformer.layers.base import Layer, register


class _Norm(Layer):
    """What both share: a gain for every feature and the type to compute in."""

    def __init__(self, epsilon, compute_type="float32", **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon
        self.compute_type = compute_type
        self.supports_masking = True

    def build(self, input_shape):
        self.gamma = self.add_weight(
            (input_shape[-1],), "ones", axes=("norm",), name="gamma", autocast=False
        )
        self.built = True

    def call(self, inputs):
        y = self.normalize(tf.cast(inputs, self.compute_type))
        return tf.cast(y, self.compute_dtype)

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

    def __init__(self, epsilon=1e-5, compute_type="float32", **kwargs):
        super().__init__(epsilon, compute_type, **kwargs)

    def build(self, input_shape):
        super().build(input_shape)
        self.beta = self.add_weight(
            (input_shape[-1],), "zeros", axes=("norm",), name="beta", autocast=False
        )

    def normalize(self, x):
        mean = tf.reduce_mean(x, axis=-1, keepdims=True)
        centered = x - mean
        variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
        x = centered * tf.math.rsqrt(variance + self.epsilon)
        return x * self.weight(self.gamma) + self.weight(self.beta)


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

    def __init__(self, epsilon=1e-6, compute_type="float32", **kwargs):
        super().__init__(epsilon, compute_type, **kwargs)

    def normalize(self, x):
        mean_square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
        return x * tf.math.rsqrt(mean_square + self.epsilon) * self.weight(self.gamma)
