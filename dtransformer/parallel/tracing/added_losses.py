"""Detection of layers that call `add_loss`, without a call of the layer."""

import functools
import inspect
import sys

import keras


def may_add_losses(layer: keras.layers.Layer) -> bool:
    """Return whether a call of a layer, without inner layers, may add a loss.

    Layers of Keras and of this package add one only for an activity regularizer.
    """
    has_regularizer = getattr(layer, "activity_regularizer", None) is not None
    return has_regularizer or any(map(_code_adds_losses, type(layer).__mro__))


@functools.cache
def _code_adds_losses(cls):
    """Return whether `add_loss` appears in the code of a user's class or of its module."""
    if cls is object or cls.__module__.startswith(("keras.", "dtransformer.")):
        return False
    module = vars(sys.modules.get(cls.__module__, cls))
    functions = filter(inspect.isfunction, [*vars(cls).values(), *module.values()])
    return any("add_loss" in inspect.unwrap(f).__code__.co_names for f in functions)
