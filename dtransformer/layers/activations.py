"""Activation functions whose gradients store fewer tensors than TensorFlow's.

References:

- [Hendrycks and Gimpel, 2016](https://arxiv.org/abs/1606.08415), for GELU
- [Shazeer, 2020](https://arxiv.org/abs/2002.05202), for gated activations
- [OpenAI, 2025](https://arxiv.org/abs/2508.10925), for the clamped gate of gpt-oss
- [Huang, 2024](https://arxiv.org/abs/2411.13010), for xIELU
"""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.parallel.ops.custom_gradient import custom_gradient, prevent_reuse
from dtransformer.parallel.ops.fused import fused

# Clamp and sigmoid slope of gpt-oss' gate.
_GATE_LIMIT = 7.0
_GATE_SLOPE = 1.702


@register
def gelu(x: tf.Tensor) -> tf.Tensor:
    """Return x · Φ(x), where Φ is the standard normal distribution function.

    The gradient stores only x. TensorFlow's stores five tensors of the same size.
    """
    return _recomputed(_gelu, x)


@register
def gelu_tanh(x: tf.Tensor) -> tf.Tensor:
    """Return the tanh approximation of GELU that GPT-2 and BERT were trained with.

    The gradient stores only x.
    """
    return _recomputed(_gelu_tanh, x)


@register
def relu2(x: tf.Tensor) -> tf.Tensor:
    """Return max(x, 0)², the squared ReLU ([So et al., 2021](https://arxiv.org/abs/2109.08668))."""
    return _recomputed(lambda x: tf.square(tf.nn.relu(x)), x)


@register
def clamped_swiglu(gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return the gated activation of gpt-oss: (x + 1) · g · σ(1.702 · g), with x and g clamped.

    x is clamped to [−7, 7] and the gate g to at most 7. The gradient stores only the two arguments.
    """
    return _recomputed(_clamped_swiglu, gate, x)


# Linear slope of xIELU, and the largest input of its exponential function.
XIELU_SLOPE = 0.5
XIELU_LIMIT = -1e-6
# Names of xIELU's weights -> their first values.
XIELU_WEIGHTS = {
    "xielu_alpha_p": math.log(math.expm1(0.8)),
    "xielu_alpha_n": math.log(math.expm1(0.8 - XIELU_SLOPE)),
}


@register
def xielu(x: tf.Tensor, alpha_p: tf.Tensor, alpha_n: tf.Tensor) -> tf.Tensor:
    """Return xIELU, an activation with two trained scalars per layer.

    It is a · x² + x / 2 for x > 0, and b · (exp(x) − 1 − x) + x / 2 otherwise, where a is
    softplus(alpha_p) and b is softplus(alpha_n) + 1/2. The gradient stores only the arguments.

    Args:
        x: Floating-point tensor.
        alpha_p, alpha_n: Weights with shape `[1]`.
    """
    return _recomputed(_xielu, x, alpha_p, alpha_n)


def _xielu(x, alpha_p, alpha_n):
    wide = _widen(x)
    a = tf.math.softplus(_widen(alpha_p))
    b = tf.math.softplus(_widen(alpha_n)) + XIELU_SLOPE
    negative = b * (tf.math.expm1(tf.minimum(wide, XIELU_LIMIT)) - wide)
    y = tf.where(wide > 0, a * tf.square(wide), negative) + XIELU_SLOPE * wide
    return tf.cast(y, x.dtype)


def _clamped_swiglu(gate, x):
    gate = tf.minimum(gate, _GATE_LIMIT)
    x = tf.clip_by_value(x, -_GATE_LIMIT, _GATE_LIMIT)
    return (x + 1) * gate * tf.sigmoid(_GATE_SLOPE * gate)


def gated_product(activation: Callable, gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Return activation(gate) · x, elementwise.

    For the activations of this module and SiLU, the gradient stores only `gate` and `x` and
    computes the activation again, which costs little next to the matrix products. An activation
    with `needs_gate` computes the entire product.

    Args:
        activation: Function of one tensor, or `clamped_swiglu`.
        gate: Floating-point tensor.
        x: Tensor of the gate's shape and type.

    Returns:
        A tensor of the same shape and type.
    """
    if needs_gate(activation):
        return activation(gate, x)
    function = next(
        (forward for public, forward in _FORWARD_FUNCTIONS if public is activation), None
    )
    if function is None:
        return activation(gate) * x
    return _recomputed(lambda gate, x: function(gate) * x, gate, x)


def needs_gate(activation: Callable) -> bool:
    """Return whether an activation takes the gate and the gated tensor: `clamped_swiglu` only."""
    return activation is clamped_swiglu


def _gelu(x):
    return tf.cast(keras.activations.gelu(_widen(x), approximate=False), x.dtype)


def _gelu_tanh(x):
    # Keras computes a power, which is slow, and (1 + tanh(u)) / 2, which loses digits for u < 0. It
    # equals the sigmoid of 2u.
    wide = _widen(x)
    factor = 2 * math.sqrt(2 / math.pi)
    gate = tf.sigmoid(wide * (factor + factor * 0.044715 * tf.square(wide)))
    return tf.cast(wide * gate, x.dtype)


def _widen(x):
    """Return a 16-bit tensor in float32, since each operation in 16 bits would round."""
    return tf.cast(x, "float32") if x.dtype.size < 4 else x


_FORWARD_FUNCTIONS = (
    (gelu, _gelu),
    (gelu_tanh, _gelu_tanh),
    (keras.activations.silu, keras.activations.silu),
)


def _recomputed(compute, *args):
    """Return compute(*args) with a gradient that stores only the arguments.

    The second computation depends on the incoming gradient. Otherwise TensorFlow would reuse, and
    store, the first results. Value dependencies are used because DTensor ignores control
    dependencies.
    """

    def gradients(dy, *args):
        with tf.control_dependencies([dy]), tf.GradientTape() as tape:
            inputs = [prevent_reuse(arg, dy) for arg in args]
            tape.watch(inputs)
            y = compute(*inputs)
        return tape.gradient(y, inputs, dy)

    @custom_gradient
    def activate(*args):
        return fused(compute)(*args), lambda dy: fused(gradients)(dy, *args)

    return activate(*map(tf.convert_to_tensor, args))


# Names that Keras lacks, and Keras' names with a gradient that stores less.
_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "clamped_swiglu": clamped_swiglu,
    "xielu": xielu,
}


def get_activation(identifier: str | dict | Callable, allow_weights: bool = False) -> Callable:
    """Return an activation function.

    Args:
        identifier: Name of a function in this module or in `keras.activations`; a serialized Keras
            object; the class of a layer; or a callable, which is returned as is.
        allow_weights: Boolean. Whether to allow `xielu`, which needs weights. Defaults to `False`.

    Raises:
        ValueError: If the name is unknown, or the activation needs weights without
            `allow_weights`.
    """
    if identifier in ("xielu", xielu) and not allow_weights:
        raise ValueError(
            "`hidden_act='xielu'` has weights, but only feed-forward layers without experts support "
            "them. Choose an activation without weights."
        )
    if isinstance(identifier, dict):  # The config of a layer stores an activation as a dictionary.
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, type):  # A layer class becomes an instance.
        identifier = identifier()
    if callable(identifier):
        return identifier
    if identifier in _ACTIVATIONS:
        return _ACTIVATIONS[identifier]
    names = {
        name
        for name, value in vars(keras.activations).items()
        if callable(value) and name not in ("get", "serialize", "deserialize")
    }
    if identifier not in names:
        choices = ", ".join(sorted({*names, *_ACTIVATIONS}))
        raise ValueError(f"`hidden_act={identifier!r}` is unknown. Choose one of {choices}.")
    return keras.activations.get(identifier)
