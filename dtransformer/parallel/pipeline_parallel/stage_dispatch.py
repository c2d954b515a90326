"""Dispatch of placed layers while a network, or one of its model chunks, is traced.

Inside `with view(...)`, placed layers are called through a view. It computes the layers of its
chunk and returns placeholder outputs, or received tensors, for layers of other stages.
"""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.stage_assignment import check_here
from dtransformer.parallel.recompute.recompute import requested
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.tracing.trace import Scoped
from dtransformer.parallel.zero.gather import read_copy

# Layers of another stage return placeholder outputs during tracing.


def output_specs(layer, args: tuple, kwargs: dict):
    """Return nested `keras.KerasTensor` objects for the results of `layer(*args, **kwargs)`.

    They come from `compute_output_spec`, which by default uses `compute_output_shape` or traces
    `call`.
    """
    args, kwargs = tf.nest.map_structure(_symbol, (args, kwargs))
    return layer.compute_output_spec(*args, **kwargs)


def call_masks(layer, compute: Callable, args: tuple, kwargs: dict) -> dict:
    """Return `keras.KerasTensor` objects for the masks that a call itself sets on its results.

    Masks that Keras derives from `compute_mask` after the call exist on every stage.

    Args:
        layer: The layer.
        compute: Method of the layer. It is traced again with the arguments.
        args: Positional arguments of the method.
        kwargs: Keyword arguments of the method.

    Returns:
        A dict that maps indices of flattened results to masks.
    """
    layers = _compat.flat_layers(layer)
    if all(type(layer_inside).__module__.startswith("dtransformer.") for layer_inside in layers):
        return {}  # Layers of this package have a `compute_mask`.
    masks = _compat.get_keras_masks((args, kwargs))
    symbols = tf.nest.map_structure(_symbol, (args, kwargs, masks))

    def masks_of_results(args, kwargs, masks):
        args, kwargs = _compat.with_masks((args, kwargs), masks)
        return _compat.get_keras_masks(compute(*args, **kwargs))

    return _compat.compute_output_spec(masks_of_results, *symbols)


def _symbol(x):
    return keras.KerasTensor(tuple(x.shape), x.dtype.name) if tf.is_tensor(x) else x


def placeholder_outputs(layer, args: tuple, kwargs: dict):
    """Return nested zeros in the shapes of the results of `layer(*args, **kwargs)`.

    Unknown dimensions are taken from the first input.
    """
    specs = output_specs(layer, args, kwargs)
    return tf.nest.map_structure(lambda spec: make_zeros(spec, args, kwargs), specs)


def make_zeros(spec, args: tuple, kwargs: dict):
    """Return zeros for a `keras.KerasTensor`, with unknown dimensions from the first argument.

    Other values are returned as they are.
    """
    if not isinstance(spec, keras.KerasTensor):
        return spec
    first = next(filter(tf.is_tensor, tf.nest.flatten((args, kwargs))), None)
    dims = [] if first is None else static_or_dynamic_shape(first)
    sizes = zip(spec.shape, [*dims, *[1] * len(spec.shape)])
    return tf.zeros([dim if size is None else size for size, dim in sizes], spec.dtype)


def check_output(layer, index: int, x: tf.Tensor, args: tuple, kwargs: dict) -> None:
    """Check a layer's output against its declared shape and dtype.

    Args:
        layer: The layer.
        index: Integer. Index among the flattened results.
        x: The result, a tensor.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ValueError: If the shape or the dtype differs from the layer's output spec.
    """
    specs = dict(enumerate(tf.nest.flatten(output_specs(layer, args, kwargs))))
    spec = specs.get(index)
    if spec is None or not x.shape.is_compatible_with(spec.shape) or x.dtype != spec.dtype:
        declared = "no such result" if spec is None else f"{spec.dtype} {tuple(spec.shape)}"
        raise ValueError(
            f"Result {index} of {layer.path} is {x.dtype.name} {tuple(x.shape)}, but the layer "
            f"declares {declared}, which other pipeline stages rely on. Give the layer a "
            "`compute_output_shape`, or a `compute_output_spec` if results are not of its compute "
            "dtype."
        )


_view = Scoped("stage_view")


@contextlib.contextmanager
def view(of):
    """Context manager that routes calls of placed layers through the view `of`."""
    with _view.set(of):
        yield of


def dispatched(call: Callable) -> Callable:
    """Wrap a layer's method `call` so that only the layer's stage computes it.

    Keras has built the layer and cast and masked its inputs before.
    """

    @functools.wraps(call)
    def call_here(layer, *args, **kwargs):
        return dispatch(layer, functools.partial(call, layer), args, kwargs)

    return call_here


def dispatch(
    layer, compute: Callable, args: tuple, kwargs: dict, placeholder: Callable = placeholder_outputs
):
    """Return `compute(*args, **kwargs)`, or a substitute if another stage computes it.

    Args:
        layer: The layer.
        compute: Method of the layer.
        args: Positional arguments of the method.
        kwargs: Keyword arguments of the method.
        placeholder: Function of `(layer, args, kwargs)` that returns placeholder outputs.

    Raises:
        RuntimeError: If another stage has the layer and no view is active.
    """
    compute = requested(layer, compute)
    # Keras only asks for shapes here.
    if layer.pipeline_stage is None or _compat.in_symbolic_scope():
        return compute(*args, **kwargs)
    current = _view.get()
    if current is not None:
        return current.call(layer, compute, placeholder, args, kwargs)
    check_here(layer)
    return compute(*args, **kwargs)


def current_chunk() -> int | None:
    """Return the index of the model chunk being computed, or `None`."""
    return getattr(_view.get(), "chunk", None)


class ChunkView:
    """View that computes the placed layers of one chunk.

    Other layers return received tensors or placeholders.

    Args:
        chunk: Integer. Index of the model chunk.
        dataflow: `Dataflow` of the computation.
        received: Dict of the received tensors by the names in `dataflow.received_by(chunk)`.

    Attributes:
        chunk: Index of the model chunk.
        sent: Dict of the tensors to send by the names in `dataflow.sent_after(chunk)`.
    """

    def __init__(self, chunk, dataflow, received):
        self.chunk = chunk
        self._dataflow = dataflow
        self._received = received
        self._names = CallNames()
        self._sent = {tensor.name: tensor for tensor in dataflow.sent_after(chunk)}
        self.sent = {name: x for name, x in received.items() if name in self._sent}

    def call(self, layer, compute, placeholder, args, kwargs):
        name = self._names.next(layer)
        if self._dataflow.chunk_of_call(name, layer) == self.chunk:
            with view(None):  # Inner layers of a placed layer belong to its chunk.
                results = compute(*args, **kwargs)
            self._keep_sent(layer, name, results, args, kwargs)
            return results
        results = placeholder(layer, args, kwargs)
        flat = tf.nest.flatten(results)
        for i, x in enumerate(flat):
            flat[i] = self._received.get(f"{name}:{i}", x)
            mask = self._received.get(mask_name(name, i))
            if mask is not None:
                _compat.with_mask(flat[i], mask)
        if self.chunk in self._dataflow.get_copy_chunks(layer):
            for i, weight in layer.weight_outputs.items():
                flat[i] = read_copy(getattr(layer, weight))
        return tf.nest.pack_sequence_as(results, flat)

    def _keep_sent(self, layer, name, results, args, kwargs):
        for i, x in enumerate(tf.nest.flatten(results)):
            sent = self._sent.get(f"{name}:{i}")
            if sent is not None:
                check_output(layer, i, x, args, kwargs)
                self.sent[sent.name] = x if sent.has_gradient else tf.stop_gradient(x)
            if mask_name(name, i) in self._sent:
                self.sent[mask_name(name, i)] = _compat.get_keras_mask(x)


def mask_name(call: str, index: int) -> str:
    """Return the name of the mask that a call sets on one of its results."""
    return f"{call}:{index}.mask"


class CallNames:
    """Names of layer calls, identical on all ranks. A layer may be called more than once."""

    def __init__(self):
        self._numbers = {}  # Maps the id of a layer to the index of its last call.
        # Maps a path to the ids of its layers. Equal parts of a network share paths.
        self._layers = {}

    def next(self, layer) -> str:
        """Return the name of a layer's next call."""
        call_index = self._numbers[id(layer)] = self._numbers.get(id(layer), -1) + 1
        path = layer.path or layer.name  # Keras layers without weights have no path.
        layers = self._layers.setdefault(path, [])
        if id(layer) not in layers:
            layers.append(id(layer))
        path_index = layers.index(id(layer))
        path += f"~{path_index}" if path_index else ""
        return path + (f"#{call_index}" if call_index else "")
