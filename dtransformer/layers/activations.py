"""Activations: Keras' by their names, and those whose gradients keep less than TensorFlow's do.

Reference: Hendrycks and Gimpel, 2016, "Gaussian error linear units (GELUs)", arXiv 1606.08415.
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.parallel.custom_gradient import custom_gradient


@register
def gelu(x: tf.Tensor) -> tf.Tensor:
    """Return x · Φ(x), Φ the distribution function of a normal variable.

    The gradient keeps two tensors like x, where TensorFlow's keeps five.
    """

    @custom_gradient
    def activate(x):
        share = 0.5 * tf.math.erfc(_wide(x) * -math.sqrt(0.5))
        y, kept = tf.cast(_wide(x) * share, x.dtype), tf.cast(share, x.dtype)

        def gradient(dy):
            density = tf.exp(-0.5 * tf.square(_wide(x))) * (1 / math.sqrt(2 * math.pi))
            return tf.cast(_wide(dy) * (_wide(kept) + _wide(x) * density), x.dtype)

        return y, gradient

    return activate(tf.convert_to_tensor(x))


@register
def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """The approximation of GELU by tanh that GPT-2 and BERT were trained with.

    Its gradient keeps two tensors like x, too.
    """
    scale, cubic = math.sqrt(2 / math.pi), 0.044715

    @custom_gradient
    def activate(x):
        bent = tf.tanh(_wide(x) * (scale + scale * cubic * tf.square(_wide(x))))
        y, kept = tf.cast(0.5 * _wide(x) * (1 + bent), x.dtype), tf.cast(bent, x.dtype)

        def gradient(dy):
            slope = scale + 3 * scale * cubic * tf.square(_wide(x))
            share = 1 + _wide(kept) + _wide(x) * (1 - tf.square(_wide(kept))) * slope
            return tf.cast(0.5 * _wide(dy) * share, x.dtype)

        return y, gradient

    return activate(tf.convert_to_tensor(x))


def _wide(x):
    """Return a tensor in float32, where its own type is of 16 bits: each operation would round."""
    return tf.cast(x, "float32") if x.dtype.size < 4 else x


# Names that are not Keras', or whose gradient is not.
_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def get_activation(identifier: str | dict | Callable) -> Callable:
    """Return an activation by its Keras name, or "gelu_tanh"; or the callable itself.

    Raises:
        ValueError: the name is unknown; lists what exists.
    """
    if isinstance(identifier, dict):  # from a config
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, type):  # the class of a layer
        identifier = identifier()
    if callable(identifier):
        return identifier
    if identifier in _ACTIVATIONS:
        return _ACTIVATIONS[identifier]
    names = sorted(
        name
        for name, value in vars(keras.activations).items()
        if callable(value) and name not in ("get", "serialize", "deserialize")
    )
    if identifier not in names:
        raise ValueError(f"hidden_act {identifier!r} is unknown; there are {', '.join(names)}")
    return keras.activations.get(identifier)
