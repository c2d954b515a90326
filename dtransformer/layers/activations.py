"""Activations: Keras' by their names, and those whose gradients keep less than TensorFlow's do.

References: Hendrycks and Gimpel, 2016, "Gaussian error linear units (GELUs)", arXiv 1606.08415;
Shazeer, 2020, "GLU variants improve Transformer", arXiv 2002.05202, for gates.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.parallel.custom_gradient import custom_gradient


@register
def gelu(x: tf.Tensor) -> tf.Tensor:
    """Return x · Φ(x), Φ the distribution function of a normal variable.

    The gradient keeps two tensors like x, where TensorFlow's keeps five.
    """
    return _activated(x, _SHARES[gelu])


@register
def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """The approximation of GELU by tanh that GPT-2 and BERT were trained with.

    Its gradient keeps two tensors like x, too.
    """
    return _activated(x, _SHARES[gelu_tanh])


@register
def silu(x: tf.Tensor) -> tf.Tensor:
    """Return x · σ(x), σ the logistic function; the gradient keeps x alone."""
    return _activated(x, _SHARES[silu])


def gated(activation: Callable, gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return activation(gate) · x, tensors of one shape and type.

    With an activation of this module the gradient computes activation(gate) again, which takes no
    product: it keeps the two tensors, and the share if the activation's own gradient does.
    """
    if activation not in _SHARES:
        return activation(gate) * x
    kind = _SHARES[activation]

    @custom_gradient
    def multiply(gate, x):
        active, share_again = _times_share(gate, kind)

        def gradients(dy):
            with tf.control_dependencies([dy]):  # or TensorFlow takes, and keeps, the first ones
                share = share_again()
                active = tf.cast(_wide(gate) * share, gate.dtype)
            slope = kind.slope(_wide(gate), share)
            return tf.cast(_wide(dy) * _wide(x) * slope, gate.dtype), dy * active

        return active * x, gradients

    return multiply(gate, x)


class _Share(NamedTuple):
    """An activation of the form x · share(x).

    Args:
        share: a function of x.
        slope: a function of x and its share, which returns the activation's derivative.
        is_cheap: whether the share is computed again rather than kept for the gradient.
    """

    share: Callable
    slope: Callable
    is_cheap: bool = False


def _gelu_share(x):
    return 0.5 * tf.math.erfc(x * -math.sqrt(0.5))


def _gelu_slope(x, share):
    return share + x * tf.exp(-0.5 * tf.square(x)) * (1 / math.sqrt(2 * math.pi))


_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_share(x):
    return 0.5 + 0.5 * tf.tanh(x * (_SCALE + _SCALE * _CUBIC * tf.square(x)))


def _tanh_slope(x, share):
    return share + x * 2 * share * (1 - share) * (_SCALE + 3 * _SCALE * _CUBIC * tf.square(x))


def _activated(x, kind):
    @custom_gradient
    def activate(x):
        y, share_again = _times_share(x, kind)

        def gradient(dy):
            with tf.control_dependencies([dy]):
                share = share_again()
            return tf.cast(_wide(dy) * kind.slope(_wide(x), share), x.dtype)

        return y, gradient

    return activate(tf.convert_to_tensor(x))


def _times_share(x, kind):
    """Return x · share(x), and a function that returns the share once more, in `_wide`'s type."""
    share = kind.share(_wide(x))
    y = tf.cast(_wide(x) * share, x.dtype)
    if kind.is_cheap:
        return y, lambda: kind.share(_wide(x))
    kept = tf.cast(share, x.dtype)
    return y, lambda: _wide(kept)


def _wide(x):
    """Return a tensor in float32, where its own type is of 16 bits: each operation would round."""
    return tf.cast(x, "float32") if x.dtype.size < 4 else x


# Names that are not Keras', or whose gradient is not.
_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "swish": silu}
_SHARES = {
    gelu: _Share(_gelu_share, _gelu_slope),
    gelu_tanh: _Share(_tanh_share, _tanh_slope),
    silu: _Share(tf.sigmoid, lambda x, share: share * (1 + x * (1 - share)), is_cheap=True),
}


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
