"""Stage dispatch of placed layers while a network, or one model chunk of it, is traced.

Inside of `with view(...)` placed layers are called through a view: it computes those that are
its own, and gives placeholder outputs, or what was received, for those of other stages.
"""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.stage_assignment import check_here, chunk_of
from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# Placeholder outputs: what layers of another stage give while a computation is traced.


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

    def masks_of_results(args, kwargs, masks):
        args, kwargs = _compat.with_masks((args, kwargs), masks)
        return _compat.masks_of(compute(*args, **kwargs))

    return _compat.compute_output_spec(masks_of_results, *given)


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
    first = next(filter(tf.is_tensor, tf.nest.flatten((args, kwargs))), None)
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


_view = Scoped("stage_view")


@contextlib.contextmanager
def view(of):
    """Let placed layers inside the `with` block be called through `of`."""
    with _view.set(of):
        yield of


def dispatched(call: Callable) -> Callable:
    """Return a layer's method `call`, which other stages do not compute.

    The method comes after all that Keras does with a layer's inputs: builds, casts, masks.
    """

    @functools.wraps(call)
    def call_here(layer, *args, **kwargs):
        return dispatch(layer, functools.partial(call, layer), args, kwargs)

    return call_here


def dispatch(
    layer, compute: Callable, args: tuple, kwargs: dict, placeholder: Callable = placeholder_outputs
):
    """Return compute(*args, **kwargs), or what there is of it where another stage computes it.

    Args:
        layer: the layer.
        compute: a method of it.
        args, kwargs: the method's arguments.
        placeholder: a function of (layer, args, kwargs) that returns placeholder outputs.

    Raises:
        RuntimeError: another stage has the layer, and no view is there to stand for it.
    """
    if layer.pipeline_stage is None or _compat.in_symbolic_scope():  # shapes are asked for only
        return compute(*args, **kwargs)
    current = _view.get()
    if current is not None:
        return current.call(layer, compute, placeholder, args, kwargs)
    check_here(layer)
    return compute(*args, **kwargs)


def current_chunk() -> int | None:
    """Return the number of the model chunk that is computed; None where none is."""
    return getattr(_view.get(), "chunk", None)


class ChunkView:
    """Computes one chunk's placed layers; others give what was received, or placeholders.

    Args:
        chunk: number of the model chunk.
        dataflow: the `Dataflow`.
        received: dict of the names of `dataflow.received_by(chunk)` and their tensors.

    Attributes:
        chunk: the number.
        sent: dict of the names of `dataflow.sent_after(chunk)` and their tensors.
    """

    def __init__(self, chunk, dataflow, received):
        self.chunk, self._dataflow, self._received = chunk, dataflow, received
        self._names = CallNames()
        self._wanted = {tensor.name for tensor in dataflow.sent_after(chunk)}
        self.sent = {name: x for name, x in received.items() if name in self._wanted}

    def call(self, layer, compute, placeholder, args, kwargs):
        name = self._names.next(layer)
        if chunk_of(layer, self._dataflow.placement) == self.chunk:
            with view(None):  # what is inside of a placed layer is with it
                results = compute(*args, **kwargs)
            self._keep_sent(layer, name, results, args, kwargs)
            return results
        results = placeholder(layer, args, kwargs)
        flat = tf.nest.flatten(results)
        for number, x in enumerate(flat):
            flat[number] = self._received.get(f"{name}:{number}", x)
            mask = self._received.get(mask_name(name, number))
            if mask is not None:
                _compat.with_mask(flat[number], mask)
        if self.chunk in self._dataflow.copies_of(layer):
            for number, weight in layer.results_that_are_weights.items():
                flat[number] = tf.convert_to_tensor(getattr(layer, weight))
        return tf.nest.pack_sequence_as(results, flat)

    def _keep_sent(self, layer, name, results, args, kwargs):
        for number, x in enumerate(tf.nest.flatten(results)):
            if f"{name}:{number}" in self._wanted:
                check_output(layer, number, x, args, kwargs)
                self.sent[f"{name}:{number}"] = x
            if mask_name(name, number) in self._wanted:
                self.sent[mask_name(name, number)] = _compat.mask_of(x)


def mask_name(call: str, number: int) -> str:
    """Return the name of the mask that a call has left on one of its results."""
    return f"{call}:{number}.mask"


class CallNames:
    """Names of calls, the same on every rank: a layer may be called more than once."""

    def __init__(self):
        self._numbers = {}  # id of a layer -> number of its calls
        self._layers = {}  # path -> ids of the layers that have it, such as in two equal parts

    def next(self, layer) -> str:
        """Return the name of a layer's next call."""
        number = self._numbers[id(layer)] = self._numbers.get(id(layer), -1) + 1
        path = layer.path or layer.name  # Keras' layers without weights have no path
        layers = self._layers.setdefault(path, [])
        if id(layer) not in layers:
            layers.append(id(layer))
        namesake = layers.index(id(layer))
        return path + f"~{namesake}" * bool(namesake) + f"#{number}" * bool(number)
