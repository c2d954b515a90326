"""Activations: Keras' by their names, and those whose gradients keep less than TensorFlow's do.

References: Hendrycks and Gimpel, 2016, "Gaussian error linear units (GELUs)", arXiv 1606.08415;
Shazeer, 2020, "GLU variants improve Transformer", arXiv 2002.05202, for gates; OpenAI, 2025, gpt-oss
model card, arXiv 2508.10925, for one that is clamped.
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.parallel.ops.custom_gradient import computed_anew, custom_gradient

_LIMIT, _SLOPE = 7.0, 1.702  # of gpt-oss' gate


@register
def gelu(x: tf.Tensor) -> tf.Tensor:
    """Return x · Φ(x), Φ the distribution function of a normal variable.

    The gradient keeps x alone, where TensorFlow's keeps five tensors like it.
    """
    return _computed_again(_gelu, x)


@register
def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """The approximation of GELU by tanh that GPT-2 and BERT were trained with.

    Its gradient keeps x alone, too.
    """
    return _computed_again(_gelu_tanh, x)


@register
def relu2(x: tf.Tensor) -> tf.Tensor:
    """Return max(x, 0)², squared ReLU (So et al., 2021, "Primer", arXiv 2109.08668, §3.1)."""
    return _computed_again(lambda x: tf.square(tf.nn.relu(x)), x)


@register
def clamped_swiglu(gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return (x' + 1) · g · σ(1.702 · g), of x' = x in ±7 and g = gate of at most 7: gpt-oss' gate.

    Its gradient keeps the two alone.
    """
    return _computed_again(_clamped_swiglu, gate, x)


def _clamped_swiglu(gate, x):
    gate, x = tf.minimum(gate, _LIMIT), tf.clip_by_value(x, -_LIMIT, _LIMIT)
    return (x + 1) * gate * tf.sigmoid(_SLOPE * gate)


def gated_product(activation: Callable, gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return activation(gate) · x, elementwise, of tensors of one shape and type.

    With an activation of this module, or `"silu"`, the gradient keeps these two alone: it computes
    the activation once more, which is little beside the matrix products around it. An activation
    that `needs_gate` computes the whole product.
    """
    if needs_gate(activation):
        return activation(gate, x)
    function = next((plain for own, plain in _PLAIN if own is activation), None)
    if function is None:
        return activation(gate) * x
    return _computed_again(lambda gate, x: function(gate) * x, gate, x)


def needs_gate(activation: Callable) -> bool:
    """Return whether an activation is a function of a gate and what it multiplies."""
    return activation is clamped_swiglu


def _gelu(x):
    return tf.cast(keras.activations.gelu(_wide(x), approximate=False), x.dtype)


def _gelu_tanh(x):
    wide = _wide(x)  # Keras' takes a power, which is slow, of its gradient, too
    bent = tf.tanh(math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * tf.square(wide)))
    return tf.cast(0.5 * wide * (1 + bent), x.dtype)


def _wide(x):
    """Return a tensor in float32 where its own type is of 16 bits: each operation would round."""
    return tf.cast(x, "float32") if x.dtype.size < 4 else x


_PLAIN = ((gelu, _gelu), (gelu_tanh, _gelu_tanh), (keras.activations.silu, keras.activations.silu))


def _computed_again(compute, *args):
    """Return compute(*args), of which the gradient keeps the arguments alone.

    What is computed again waits for the result's gradient: else TensorFlow would take the first
    results, and keep them. On a mesh, where DTensor respects a dependence on values only, it decides.
    """

    @custom_gradient
    def activate(*args):
        def gradients(dy):
            with tf.control_dependencies([dy]), tf.GradientTape() as tape:
                again = [computed_anew(arg, dy) for arg in args]
                tape.watch(again)
                y = compute(*again)
            return tape.gradient(y, again, dy)

        return compute(*args), gradients

    return activate(*map(tf.convert_to_tensor, args))


# Names that are not Keras', or whose gradient is not.
_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "clamped_swiglu": clamped_swiglu,
}


def get_activation(identifier: str | dict | Callable) -> Callable:
    """Return an activation by its Keras name, or one of this module; or the callable itself.

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
