"""Placeholder outputs: what layers of another stage give while a computation is traced.

They have the shapes and types of the layer's results, from its `compute_output_spec`, and any
values: nothing that a stage computes for others depends on them.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def output_specs(layer, args: tuple, kwargs: dict):
    """Return nested `keras.KerasTensor`s like the results of layer(*args, **kwargs).

    They come from the layer's `compute_output_spec`, which by Keras' rules asks its
    `compute_output_shape`, or else traces its `call`.
    """
    args, kwargs = tf.nest.map_structure(_symbol, (args, kwargs))
    return layer.compute_output_spec(*args, **kwargs)


def left_masks(layer, compute: Callable, args: tuple, kwargs: dict) -> dict:
    """Return `keras.KerasTensor`s like the masks that a call leaves on its results by itself.

    Those that Keras derives from `compute_mask` after the call are on every stage.

    Args:
        layer: the layer.
        compute: its method, which is traced with args and kwargs, once more.
        args, kwargs: the method's arguments.

    Returns:
        A dict of the numbers of results, flattened, and their masks.
    """
    layers = _compat.flat_layers(layer)
    if all(type(one).__module__.startswith("dtransformer.") for one in layers):
        return {}  # these have a `compute_mask`
    masks = _compat.masks_of((args, kwargs))
    given = tf.nest.map_structure(_symbol, (args, kwargs, masks))
    return _Masks(compute).compute_output_spec(*given)


class _Masks(keras.Operation):
    """The masks that a function leaves on its results."""

    def __init__(self, compute):
        super().__init__()
        self._compute = compute

    def call(self, args, kwargs, masks):
        args, kwargs = _compat.with_masks((args, kwargs), masks)
        return _compat.masks_of(self._compute(*args, **kwargs))


def _symbol(x):
    return keras.KerasTensor(tuple(x.shape), x.dtype.name) if tf.is_tensor(x) else x


def placeholder_outputs(layer, args: tuple, kwargs: dict):
    """Return nested tensors like the results of layer(*args, **kwargs).

    Dimensions that are not known while tracing are those of the first input.
    """
    specs = output_specs(layer, args, kwargs)
    return tf.nest.map_structure(lambda spec: zeros_of(spec, args, kwargs), specs)


def zeros_of(spec, args: tuple, kwargs: dict):
    """Return zeros like a `keras.KerasTensor`, of a call's shapes; anything else as it is."""
    if not isinstance(spec, keras.KerasTensor):
        return spec
    first = _first_tensor(args, kwargs)
    dims = [] if first is None else static_or_dynamic_shape(first)
    known = zip(spec.shape, [*dims, *[1] * len(spec.shape)])
    return tf.zeros([dim if size is None else size for size, dim in known], spec.dtype)


def check_output(layer, number: int, x: tf.Tensor, args: tuple, kwargs: dict) -> None:
    """Check that a result of a layer is what other stages take it for.

    Args:
        layer: the layer, called with args and kwargs.
        number: number of the result among the flattened results.
        x: the result, a tensor.

    Raises:
        ValueError: its shape or type is not what the layer's shape rule tells.
    """
    specs = dict(enumerate(tf.nest.flatten(output_specs(layer, args, kwargs))))
    spec = specs.get(number)
    if spec is None or not x.shape.is_compatible_with(spec.shape) or x.dtype != spec.dtype:
        message = "there is none" if spec is None else f"{spec.dtype} {tuple(spec.shape)}"
        raise ValueError(
            f"result {number} of {layer.path} is {x.dtype.name} {tuple(x.shape)}, but by its shape "
            f"rule {message}: other pipeline stages go by the rule; give the layer a "
            "compute_output_shape, or a compute_output_spec where results are not of its compute "
            "type"
        )


def _first_tensor(args, kwargs):
    return next((x for x in tf.nest.flatten((args, kwargs)) if tf.is_tensor(x)), None)
