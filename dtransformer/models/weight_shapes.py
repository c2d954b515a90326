"""The shapes of weights before any is made: those of a copy of the network, which has no values.

They are those of every layout: without a vocabulary's padding, and with all stages' layers.
"""

from collections.abc import Callable, Mapping

import keras

from dtransformer.parallel.variable_factory import shapes_alone

Shapes = dict[str, tuple[int, ...]]


def of_network(kind: Callable[..., keras.Model], arguments: Mapping) -> Shapes:
    """Return the shapes of a network's weights by their paths, without its name.

    Args:
        kind: its class.
        arguments: what it is made of.
    """
    return _built(lambda: kind(**arguments), None)


def of_layer(layer: keras.Layer, input_shape: tuple) -> Shapes:
    """Return the shapes of a layer's weights by their paths below it, built or not.

    Args:
        layer: the layer, of which a copy is built.
        input_shape: of the copy's inputs.
    """
    return _built(lambda: type(layer).from_config(layer.get_config()), input_shape)


def _built(make, input_shape):
    with shapes_alone():
        layer = make()
        layer.build(input_shape)
    return {v.path.partition("/")[2]: tuple(v.shape) for v in layer.variables}
