"""Search for the layer whose outputs overflow first."""

import contextlib
import functools

import keras
import tensorflow as tf

from dtransformer import _compat


def first_overflow(model: keras.Model, batch: tuple) -> str | None:
    """Call a model eagerly and return the path of the first layer with inf or nan outputs.

    Args:
        model: A `keras.Model` that is built.
        batch: Inputs, or a tuple of inputs and labels, nested tensors [b, ...].

    Returns:
        The path, or `None` if all outputs are finite.
    """
    paths = []

    def checked_call(layer, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        for x in filter(tf.is_tensor, tf.nest.flatten(outputs)):
            if x.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(x)):
                paths.append(layer.path)
        return outputs

    with contextlib.ExitStack() as stack:
        for layer in _compat.flat_layers(model):
            stack.enter_context(
                _compat.patched(layer, call=functools.partial(checked_call, layer, layer.call))
            )
        model.call(keras.utils.unpack_x_y_sample_weight(batch)[0])
    return next(iter(paths), None)
