"""Shapes of weights, from a copy of the network that has no values.

The shapes are the same in every layout: vocabularies have no padding, and all pipeline
stages are included.
"""

from collections.abc import Callable, Mapping

import keras

from dtransformer.parallel.variable_factory import shapes_alone

Shapes = dict[str, tuple[int, ...]]


def network_shapes(kind: Callable[..., keras.Model], arguments: Mapping) -> Shapes:
    """Return a dict from weight paths to shapes. Paths exclude the network's name.

    Args:
        kind: Class of the network.
        arguments: Dict of the constructor's arguments.
    """
    return _built_shapes(lambda: kind(**arguments), None)


def layer_shapes(layer: keras.Layer, input_shape: tuple) -> Shapes:
    """Return a dict from weight paths to shapes. Paths exclude the layer's name.

    Args:
        layer: Layer, built or not. The function builds a copy of it.
        input_shape: Input shape to build the copy with.
    """
    return _built_shapes(lambda: type(layer).from_config(layer.get_config()), input_shape)


def _built_shapes(make, input_shape):
    with shapes_alone():
        layer = make()
        layer.build(input_shape)
    return {v.path.partition("/")[2]: tuple(v.shape) for v in layer.variables}
