"""Dataflow between the model chunks of a pipeline.

Chunks exchange results of placed layers. They are found by tracing the network once with
placeholder outputs for all placed layers, so users declare nothing.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.stage_assignment import can_be_copied, get_chunk
from dtransformer.parallel.pipeline_parallel.stage_dispatch import (
    CallNames,
    call_masks,
    make_zeros,
    mask_name,
    view,
)
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.tracing.tensor_specs import tensor_specs


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a placed layer's call, or the mask that the call sets on a result.

    Args:
        layer: The layer.
        call: String. Name of the call, identical on all ranks.
        index: Integer. Index among the flattened results of the call, or `None` for a mask.
        name: String, identical on all ranks.
        spec: `tf.TensorSpec` of the result.
    """

    layer: object
    call: str
    index: int | None
    name: str
    spec: tf.TensorSpec

    @property
    def is_weight(self) -> bool:
        """True if the result is a weight, so that other chunks can store a copy of it."""
        return self.index in self.layer.weight_outputs


@dataclasses.dataclass(frozen=True)
class Call:
    """Call of a placed layer.

    Args:
        name: String, identical on all ranks.
        layer: The layer.
        sources: List of the `Result` objects that the call needs.
        is_first: Boolean. Whether it is the layer's first call.
    """

    name: str
    layer: object
    sources: list
    is_first: bool


class DependencyRecorder:
    """View that returns placeholder outputs of layers and records the origins of their inputs.

    Args:
        function: Function of `inputs` that calls placed layers and returns nested tensors.
        inputs: Nested tensors or specs of static shapes for a micro-batch.

    Attributes:
        calls: List of `Call` objects in the order of the calls.
        ends: List of the `Result` objects that the function's outputs depend on.
        outputs: Nested specs of the function's outputs.
    """

    def __init__(self, function, inputs):
        self._names = CallNames()
        self._results = {}  # Maps the graph name of a placeholder to its Result.
        self.calls = []
        self.ends = []
        self.outputs = None

        def run(inputs):
            with view(self):
                outputs = function(inputs)
            self.ends = self._origins(outputs)
            self.outputs = tensor_specs(outputs)

        tf.function(run, autograph=False).get_concrete_function(tensor_specs(inputs))

    def call(self, layer, compute, placeholder, args, kwargs):
        name = self._names.next(layer)
        is_first = all(call.layer is not layer for call in self.calls)
        self.calls.append(Call(name, layer, self._origins((args, kwargs)), is_first))
        results = placeholder(layer, args, kwargs)
        flat = [tf.identity(x) for x in tf.nest.flatten(results)]
        for index, x in enumerate(flat):
            self._remember(x, layer, name, index, f"{name}:{index}")
        for index, spec in call_masks(layer, compute, args, kwargs).items():
            mask = make_zeros(spec, args, kwargs)
            self._remember(mask, layer, name, None, mask_name(name, index))
            _compat.with_mask(flat[index], mask)
        return tf.nest.pack_sequence_as(results, flat)

    def _remember(self, x, layer, call, index, name):
        spec = tf.TensorSpec(x.shape, x.dtype)
        self._results[x.name] = Result(layer, call, index, name, spec)

    def _origins(self, tensors):
        """Return the results that nested tensors and their masks directly depend on."""
        origins = {}
        visited = set()
        masks = list(_compat.get_keras_masks(tensors).values())
        pending = [x for x in [*tf.nest.flatten(tensors), *masks] if tf.is_tensor(x)]
        while pending:
            x = pending.pop()
            if x.name in visited:
                continue
            visited.add(x.name)
            if x.name in self._results:
                origins[x.name] = self._results[x.name]
            else:
                pending += list(x.op.inputs)
        return list(origins.values())


@dataclasses.dataclass(frozen=True)
class CrossStageTensor:
    """Result of a placed layer, or its mask, that other model chunks need.

    Args:
        name: String, identical on all ranks.
        shape: Tuple of integers.
        dtype: Name of the dtype.
        first_chunk: Integer. Chunk that computes it.
        last_chunk: Integer. Last chunk that needs it.
        is_trained: Boolean. Whether it depends on a layer that is not frozen. Defaults to `True`.
    """

    name: str
    shape: tuple
    dtype: str
    first_chunk: int
    last_chunk: int
    is_trained: bool = True

    @property
    def has_gradient(self) -> bool:
        """True if a gradient is sent back. Masks, integers and results of frozen layers have none."""
        return self.is_trained and "float" in self.dtype


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """Tensors sent between chunks, for one shape of micro-batches.

    Args:
        placement: `Placement` of the chunks.
        tensors: Tuple of `CrossStageTensor` objects.
        copies: Dict that maps the path of a layer to the other chunks that need a copy of its
            weights.
        outputs: Nested specs of the network's outputs.
        moved_calls: Dict that maps the name of a call to the chunk that computes it with copies of
            the layer's weights.
    """

    placement: Placement
    tensors: tuple
    copies: dict = dataclasses.field(default_factory=dict)
    outputs: object = None
    moved_calls: dict = dataclasses.field(default_factory=dict)

    def chunk_of_call(self, name: str, layer) -> int:
        """Return the index of the chunk that computes a call of a placed layer."""
        chunk = self.moved_calls.get(name)
        return get_chunk(layer, self.placement) if chunk is None else chunk

    def sent_after(self, chunk: int) -> list[CrossStageTensor]:
        """Return the `CrossStageTensor` objects that a chunk passes to the next one."""
        return [x for x in self.tensors if x.first_chunk <= chunk < x.last_chunk]

    def gradients_after(self, chunk: int) -> list[CrossStageTensor]:
        """Return the tensors of `sent_after(chunk)` whose gradients the next chunk sends back."""
        return [x for x in self.sent_after(chunk) if x.has_gradient]

    def received_by(self, chunk: int) -> list[CrossStageTensor]:
        """Return the `CrossStageTensor` objects that a chunk receives from the previous one."""
        return self.sent_after(chunk - 1) if chunk else []

    def get_copy_chunks(self, layer) -> frozenset[int]:
        """Return the other chunks that need a copy of a layer's weights."""
        return self.copies.get(layer.path, frozenset())

    def __str__(self):
        lines = []
        for chunk in range(self.placement.last_chunk):
            border = f"{self.placement.describe(chunk)} → {self.placement.describe(chunk + 1)}"
            for x in self.sent_after(chunk):
                lines.append(f"{border}: {x.name} {'×'.join(map(str, x.shape))} {x.dtype}")
        return "\n".join(lines)

    @classmethod
    def from_function(cls, function: Callable, inputs, placement: Placement) -> "Dataflow":
        """Return the dataflow of a function of placed layers.

        Args:
            function: Function of `inputs` that returns nested tensors.
            inputs: Nested tensors or specs of static shapes for a micro-batch.
            placement: `Placement` of the chunks.

        Raises:
            ValueError: If a chunk needs a result of a later one.
        """
        return cls._from_recorder(DependencyRecorder(function, inputs), placement)

    @classmethod
    def from_network(cls, network: keras.Model, inputs, placement: Placement) -> "Dataflow":
        """Return the dataflow of a network's training step.

        Args:
            network: `keras.Model`.
            inputs: Nested tensors or specs of static shapes for a micro-batch.
            placement: `Placement` of the chunks.

        Raises:
            ValueError: If a chunk has no layers or needs a result of a later one, or if a weight is
                not in a placed layer.
        """
        recorder = DependencyRecorder(lambda inputs: network(inputs, training=True), inputs)
        _check_places(network, [call.layer for call in recorder.calls], placement)
        return cls._from_recorder(recorder, placement)

    @classmethod
    def _from_recorder(cls, recorder, placement):
        uses = _CallPlacement(recorder, placement)
        tensors = []
        for result, last in uses.last_use.items():
            first = uses.chunks[result.call]
            spec = result.spec
            if last > first:
                shape = tuple(spec.shape)
                dtype = spec.dtype.name
                is_trained = result.call in uses.trained
                tensors.append(CrossStageTensor(result.name, shape, dtype, first, last, is_trained))
        return cls(placement, tuple(tensors), uses.copies, recorder.outputs, uses.moved)


class _CallPlacement:
    """Assignment of calls to chunks.

    A call belongs to its layer's chunk. A later call of the same layer may need results of a later
    chunk, as the head that multiplies with the embedding table does. That chunk then computes the
    call with copies of the layer's weights.

    Attributes:
        chunks: Dict that maps the name of a call to its chunk.
        moved: Part of `chunks`, the calls that another chunk than the layer's computes.
        copies: Dict that maps the path of a layer to the other chunks that need its weights.
        last_use: Dict that maps each `Result` to the last chunk that needs it.
        trained: Set of the names of calls that depend on a layer that is not frozen.
    """

    def __init__(self, recorder, placement):
        self._placement = placement
        self.chunks = {}
        self.moved = {}
        self.copies = {}
        self.last_use = {}
        self.trained = set()
        for call in recorder.calls:
            self._place(call)
            if call.layer.trainable or any(x.call in self.trained for x in call.sources):
                self.trained.add(call.name)
            self._use(call.sources, self.chunks[call.name])
        self._use(recorder.ends, placement.last_chunk)
        self._copy_inner_layers({call.layer: None for call in recorder.calls})

    def _place(self, call):
        chunk = get_chunk(call.layer, self._placement)
        self.chunks[call.name] = chunk
        for result in call.sources:
            source_chunk = self.chunks[result.call]
            if result.is_weight or source_chunk <= self.chunks[call.name]:
                continue
            if call.is_first or not can_be_copied(call.layer):
                raise ValueError(
                    f"{call.layer.path} is on {self._placement.describe(chunk)} and needs a result "
                    f"of {result.layer.path} on {self._placement.describe(source_chunk)}. Layers of "
                    "a pipeline can only use results of earlier stages, except repeated calls of a "
                    "layer without state and added losses."
                )
            self.chunks[call.name] = self.moved[call.name] = source_chunk
        if call.name in self.moved:
            self._copy(call.layer, self.moved[call.name])

    def _use(self, results, chunk):
        for result in results:
            if not result.is_weight:
                self.last_use[result] = max(self.last_use.get(result, 0), chunk)
            elif chunk != get_chunk(result.layer, self._placement):
                self._copy(result.layer, chunk)

    def _copy(self, layer, chunk):
        self.copies[layer.path] = self.copies.get(layer.path, frozenset()) | {chunk}

    def _copy_inner_layers(self, placed):
        """Copy placed layers that are also inside of a placed layer of another chunk."""
        for layer in placed:
            for inner in _compat.flat_layers(layer, include_self=False):
                chunk = get_chunk(layer, self._placement)
                if inner in placed and chunk != get_chunk(inner, self._placement):
                    self._copy(inner, chunk)


def _check_places(network, placed, placement):
    used = {get_chunk(layer, placement) for layer in placed}
    for chunk in range(placement.num_chunks):
        if chunk not in used:
            raise ValueError(
                f"{placement.describe(chunk)} of {placement.num_chunks} has no layer with weights. "
                "Change `lambda_func` or `pipeline_stage`. Blocks take their stages from the config "
                "when they are created, so call `init` before you create the network."
            )
    inside = {id(inner) for layer in placed for inner in _compat.flat_layers(layer)}
    for layer in _compat.flat_layers(network):
        if _compat.direct_variables(layer) and id(layer) not in inside:
            raise ValueError(
                f"{layer.path} has weights outside of its layers, which no pipeline stage computes "
                "with. Move them into a layer."
            )
