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
    return _activated(x, _KINDS[gelu])


@register
def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """The approximation of GELU by tanh that GPT-2 and BERT were trained with.

    Its gradient keeps two tensors like x, too.
    """
    return _activated(x, _KINDS[gelu_tanh])


@register
def silu(x: tf.Tensor) -> tf.Tensor:
    """Return x · σ(x), σ the logistic function; the gradient keeps x alone."""
    return _activated(x, _KINDS[silu])


def gated_product(activation: Callable, gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return activation(gate) · x, elementwise, of tensors of one shape and type.

    With an activation of this module the gradient keeps these two alone: it computes the
    activation once more, which is little beside the matrix products around it.
    """
    kind = next((kind for own, kind in _KINDS.items() if own is activation), None)
    if kind is None:
        return activation(gate) * x

    @custom_gradient
    def multiply(gate, x):
        active, _ = kind.forward(gate)

        def gradients(dy):
            with _not_before(dy):
                wide = kind.wide
                z = wide(gate)
                share = kind.share(z)
                active = tf.cast(z * share, x.dtype)
                to_gate = wide(dy) * kind.slope(z, share) * wide(x)
                return tf.cast(to_gate, gate.dtype), dy * active

        return active * x, gradients

    return multiply(gate, x)


class _Kind(NamedTuple):
    """An activation of the form x · share(x).

    Args:
        forward: a function of x that returns its activation, and a function that returns the
            share for the gradient: computed again, or from what was kept.
        share: the share of x that it lets through, a function of x.
        slope: its derivative, a function of x and the share.
        wide: a function that returns a tensor in the type that the gradient is computed in.
    """

    forward: Callable
    share: Callable
    slope: Callable
    wide: Callable


def _activated(x, kind):
    @custom_gradient
    def activate(x):
        y, share_again = kind.forward(x)

        def gradient(dy):
            with _not_before(dy):
                slope = kind.slope(kind.wide(x), share_again())
                return tf.cast(kind.wide(dy) * slope, x.dtype)

        return y, gradient

    return activate(tf.convert_to_tensor(x))


def _gelu(x):
    share = _gelu_share(_wide(x))
    kept = tf.cast(share, x.dtype)
    return tf.cast(_wide(x) * share, x.dtype), lambda: _wide(kept)


def _gelu_share(x):
    return 0.5 * tf.math.erfc(x * -math.sqrt(0.5))


def _gelu_slope(x, share):
    return share + x * tf.exp(-0.5 * tf.square(x)) * (1 / math.sqrt(2 * math.pi))


_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(x):
    bent = _bent(_wide(x))
    kept = tf.cast(bent, x.dtype)
    return tf.cast(0.5 * _wide(x) * (1 + bent), x.dtype), lambda: 0.5 + 0.5 * _wide(kept)


def _bent(x):
    return tf.tanh(x * (_SCALE + _SCALE * _CUBIC * tf.square(x)))


def _tanh_share(x):
    return 0.5 + 0.5 * _bent(x)


def _tanh_slope(x, share):
    return share + 2 * x * share * (1 - share) * (_SCALE + 3 * _SCALE * _CUBIC * tf.square(x))


def _silu(x):
    return x * tf.sigmoid(x), lambda: tf.sigmoid(x)


def _silu_slope(x, share):
    return share * (1 + x * (1 - share))


def _wide(x):
    """Return a tensor in float32, where its own type is of 16 bits: each operation would round."""
    return tf.cast(x, "float32") if x.dtype.size < 4 else x


_KINDS = {
    gelu: _Kind(_gelu, _gelu_share, _gelu_slope, _wide),
    gelu_tanh: _Kind(_gelu_tanh, _tanh_share, _tanh_slope, _wide),
    # Rounded as Keras' is: casts take longer than its few operations.
    silu: _Kind(_silu, tf.sigmoid, _silu_slope, tf.convert_to_tensor),
}


def _not_before(dy):
    """Return a context in which what is computed again waits for the gradient.

    Else TensorFlow would take the first results, and keep them. On a mesh and with XLA, which
    respect a dependence on values only, the compiler decides.
    """
    return tf.control_dependencies([dy])


# Names that are not Keras', or whose gradient is not.
_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "swish": silu}


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
