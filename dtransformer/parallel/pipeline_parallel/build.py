"""Build this rank's stage of a network and assign every layer to a model chunk.

Layers of other stages are also built, but only with shapes. Layers without a stage join the layers
that use them, or are distributed evenly.
"""

import functools
import math
import types
from collections.abc import Callable, Hashable, Mapping, Sequence

import keras

from dtransformer import _compat
from dtransformer.parallel.collectives.division import pack_consecutive
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow, DependencyRecorder
from dtransformer.parallel.pipeline_parallel.stage_assignment import (
    can_be_copied,
    get_chunk,
    is_placed,
    placed_layers,
)
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatch
from dtransformer.parallel.pipeline_parallel.stage_weights import (
    build_copies,
    leave_other_stages,
    mark_copies,
)
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.placement import Placement

# A call of a layer: the layer, and the layers whose results it needs.
Call = tuple[Hashable, Sequence[Hashable]]


def assign_by_use(
    calls: Sequence[Call],
    ends: Sequence[Hashable],
    fixed_chunks: Mapping[Hashable, int],
    num_chunks: int,
) -> dict[Hashable, int]:
    """Assign layers without a model chunk to the chunks of connected layers.

    A layer joins the last chunk that it needs results from. A layer that only needs the network's
    inputs joins the first chunk that uses its results.

    Args:
        calls: Sequence of the calls of all layers, in order.
        ends: Sequence of the layers that the network's outputs depend on.
        fixed_chunks: Mapping from layers to the chunks that they already have.
        num_chunks: Integer. Number of chunks of the network.

    Returns:
        A dict of the assigned chunks, without the layers in `fixed_chunks`.

    Example: an embedding, two blocks, a second embedding that only the last block needs, and a
    head.

    >>> calls = [("in", []), ("b0", ["in"]), ("more", []), ("b1", ["b0", "more"]), ("head", ["b1"])]
    >>> assign_by_use(calls, ["head"], {"b0": 0, "b1": 1}, 2)
    {'head': 1, 'more': 1, 'in': 0}
    """
    places = dict(fixed_chunks)
    for layer, sources in calls:
        chunks = [places[source] for source in sources if source in places]
        if layer not in fixed_chunks and chunks:
            places[layer] = max([*chunks, places.get(layer, 0)])
    users = {}
    for layer, sources in [*calls, (None, ends)]:
        for source in sources:
            users.setdefault(source, []).append(layer)
    for layer, _ in reversed(calls):
        if layer not in places:
            chunks = [places.get(user, num_chunks - 1) for user in users.get(layer, [None])]
            places[layer] = min(chunks)
    return {layer: chunk for layer, chunk in places.items() if layer not in fixed_chunks}


def assign_evenly(sizes: Mapping[Hashable, int], num_chunks: int) -> dict[Hashable, int]:
    """Divide consecutive layers into model chunks and minimize the largest chunk.

    Args:
        sizes: Mapping from layers, in order, to their amounts of computation.
        num_chunks: Integer. Number of chunks, at most the number of layers.

    Returns:
        A dict that maps layers to chunk indices.

    Example:

    >>> assign_evenly({"in": 1, "a": 4, "b": 4, "c": 4, "out": 2}, 2)
    {'in': 0, 'a': 0, 'b': 0, 'c': 1, 'out': 1}
    """
    low = max(sizes.values())
    high = sum(sizes.values())
    while low < high:
        limit = (low + high) // 2
        if len(pack_consecutive(sizes.values(), limit)) <= num_chunks:
            high = limit
        else:
            low = limit + 1
    chunks = pack_consecutive(sizes.values(), low)
    while len(chunks) < num_chunks:  # Halve the chunk with the most layers.
        longest = max(range(len(chunks)), key=lambda chunk: len(chunks[chunk]))
        indices = chunks[longest]
        half_size = len(chunks[longest]) // 2
        chunks[longest : longest + 1] = [indices[:half_size], indices[half_size:]]
    layers = list(sizes)
    return {layers[i]: chunk for chunk, indices in enumerate(chunks) for i in indices}


def build_stage(network: keras.Model, symbols: Callable, specs) -> Dataflow:
    """Build this rank's stage of a network.

    Args:
        network: `keras.Model`. Layers with a `pipeline_stage` keep it, and the others get one.
        symbols: Function that returns nested `keras.KerasTensor` objects for the network's inputs.
        specs: Nested specs of static shapes for the inputs.

    Returns:
        The `Dataflow` for the specs.

    Raises:
        ValueError: If the layers cannot be divided into the required number of chunks.
    """
    placement = job.placement()
    with keras.StatelessScope():  # The remaining weights get their values when this scope ends.
        if not all(layer.built for layer in _compat.flat_layers(network)):
            network(symbols())
        place_all(network, specs, placement)
        dataflow = Dataflow.from_network(network, specs, placement)
        mark_copies(network, dataflow)
        leave_other_stages(network)
    build_copies(network)
    return dataflow


def place_all(network: keras.Model, specs, placement: Placement) -> None:
    """Assign a `pipeline_stage` to each layer that needs one and has none.

    Args:
        network: Built `keras.Model`.
        specs: Nested specs of static shapes for its inputs.
        placement: `Placement` of the chunks.

    Raises:
        ValueError: If there are fewer layers with weights than chunks, or if the network itself
            adds losses or reads weights of layers.
    """
    for layer in placed_layers(network):
        _make_placeable(layer)
    parts = _unplaced_parts(network)
    recorder = _record_calls(network, specs, parts)
    loss_parts = [part for part in _unplaced_parts(network, adds_losses=True) if part not in parts]
    if loss_parts:
        parts += loss_parts
        recorder = _record_calls(network, specs, parts)
    if _compat.may_add_losses(network):
        raise ValueError(
            f"{network.name} adds a loss in its call, which no stage of a pipeline computes. Add it in "
            "a layer."
        )
    parts = [part for part in _call_order(recorder) if part in parts]
    placed = [layer for layer in _call_order(recorder) if layer not in parts]
    if placed:
        fixed_places = {layer: get_chunk(layer, placement) for layer in placed}
        # Later calls of a layer may run on other chunks, with copies of its weights.
        calls = [
            (call.layer, [result.layer for result in call.sources])
            for call in recorder.calls
            if call.is_first or not can_be_copied(call.layer)
        ]
        places = assign_by_use(
            calls, [result.layer for result in recorder.ends], fixed_places, placement.num_chunks
        )
    else:
        if len(parts) < placement.num_chunks:
            raise ValueError(
                f"{network.name} calls {len(parts)} layers with weights, but the pipeline has "
                f"{placement.num_chunks} model chunks. Each chunk needs at least one."
            )
        places = assign_evenly(_sizes(parts, recorder), placement.num_chunks)
    for part in parts:
        part.pipeline_stage = places[part]


def _unplaced_parts(layer, adds_losses=False):
    """Return the outermost unplaced layers that have variables or metrics, or add losses.

    Models and layers that contain placed layers are not returned, but their inner layers may be.
    """
    parts = []
    for inner in _compat.flat_layers(layer, include_self=False, recursive=False):
        if is_placed(inner):
            continue
        if isinstance(inner, keras.Model) or any(map(is_placed, _compat.flat_layers(inner))):
            parts += _unplaced_parts(inner, adds_losses)
        elif (
            inner.variables
            or inner.metrics
            or (adds_losses and any(map(_compat.may_add_losses, _compat.flat_layers(inner))))
        ):
            parts.append(inner)
    return list(dict.fromkeys(parts))


def _record_calls(network, specs, parts):
    """Return the `DependencyRecorder` of a network, with `parts` treated as placed layers."""
    for part in parts:
        _make_placeable(part)
        part.pipeline_stage = 0
    try:
        with _ReadGuard(parts):
            return DependencyRecorder(lambda inputs: network(inputs, training=True), specs)
    finally:
        for part in parts:
            part.pipeline_stage = None


def _make_placeable(layer):
    """Add the pipeline attributes of this package's layers to a Keras layer."""
    if hasattr(layer, "copy_chunks"):
        return
    layer.copy_chunks = frozenset()
    layer.weight_outputs = types.MappingProxyType({})
    compute = layer.call

    @functools.wraps(compute)
    def call(*args, **kwargs):
        return dispatch(layer, compute, args, kwargs)

    object.__setattr__(layer, "call", call)


class _ReadGuard(keras.StatelessScope):
    """Scope that raises an error if weights are read outside of their layer's calls."""

    def __init__(self, layers):
        super().__init__(collect_losses=True)
        self._weights = {id(variable) for layer in layers for variable in layer.variables}

    def get_current_value(self, variable):
        if id(variable) in self._weights:
            raise ValueError(
                f"{variable.path} is used outside of a call of its layer, but only one pipeline stage "
                "has it. Set `pipeline_stage=1`, or call the layer instead of reading its weights."
            )
        return super().get_current_value(variable)


def _call_order(recorder):
    return list(dict.fromkeys(call.layer for call in recorder.calls))


def _sizes(parts, recorder):
    """Return a dict of the layers in `parts` to their amounts of computation.

    A later call of a layer, such as a head that multiplies with the embedding table, counts for the
    layer before it, because the same chunk computes both.
    """
    sizes = {part: _size(part) for part in parts}
    for call in recorder.calls:
        sources = [result.layer for result in call.sources if result.layer in sizes]
        if sources and not call.is_first:
            last_source = max(sources, key=parts.index)
            sizes[last_source] += sum(math.prod(weight.shape) for weight in call.layer.variables)
    return sizes


def _size(layer):
    """Return the size of a layer for balancing stages: 1 plus its weight elements.

    Embedding tables do not count, because a position reads only one of their rows.
    """
    tables = {
        id(variable)
        for inner in _compat.flat_layers(layer)
        if isinstance(inner, keras.layers.Embedding)
        for variable in inner.variables
    }
    return 1 + sum(math.prod(v.shape) for v in layer.variables if id(v) not in tables)
