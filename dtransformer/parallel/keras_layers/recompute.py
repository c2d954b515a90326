"""Recompute of any Keras layer."""

import keras

from dtransformer import _compat


def recompute(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Let training compute a layer again in the backward pass instead of storing its activations.

    Only the inputs of the layer are stored. Call this function before the first step. A network of
    `keras.models.clone_model` or a `.keras` file keeps the setting only for layers of this library.

    Args:
        layer: Any Keras layer, such as a layer of Keras or KerasHub, a subclass, or a model inside
            of the network.

    Returns:
        The layer.

    Example:

    >>> dense = dtransformer.recompute(keras.layers.Dense(4, activation="gelu"))
    >>> dense(tf.ones((2, 3)), training=True).shape
    TensorShape([2, 4])
    """
    if hasattr(type(layer), "recomputes_call"):
        layer.recompute()
    else:
        _compat.set_remat(layer, True)
        layer.recomputes_call = True
    return layer
