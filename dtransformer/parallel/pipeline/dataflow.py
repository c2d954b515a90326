"""What passes between the model chunks of a pipeline.

What passes are results of placed layers. Which ones is found out by running the network once
with placeholder outputs for all of them: it is not declared.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline.call_views import CallNames, view
from dtransformer.parallel.pipeline.placed_layers import chunk_of
from dtransformer.parallel.pipeline.placement import Placement


@dataclasses.dataclass(frozen=True)
class CrossStageTensor:
    """A result of a placed layer that other model chunks need.

    Args:
        name: str, the same on every rank.
        shape: tuple of ints.
        dtype: name of its type.
        first_chunk: the chunk that computes it.
        last_chunk: the last chunk that needs it.
    """

    name: str
    shape: tuple
    dtype: str
    first_chunk: int
    last_chunk: int


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """What passes from chunk to chunk, for one shape of micro-batches.

    Args:
        placement: the `Placement` of the chunks.
        tensors: tuple of `CrossStageTensor`s.
        copies: dict of the path of a layer and the chunks that need a copy of its weights,
            besides its own.
        outputs: nested specs of what the network returns.
    """

    placement: Placement
    tensors: tuple
    copies: dict = dataclasses.field(default_factory=dict)
    outputs: object = None

    def sent_after(self, chunk: int) -> list[CrossStageTensor]:
        """Return the `CrossStageTensor`s that a chunk hands to the next one."""
        return [x for x in self.tensors if x.first_chunk <= chunk < x.last_chunk]

    def received_by(self, chunk: int) -> list[CrossStageTensor]:
        """Return the `CrossStageTensor`s that a chunk has from the one before."""
        return self.sent_after(chunk - 1) if chunk else []

    def copies_of(self, layer) -> frozenset[int]:
        """Return the chunks, besides its own, that need a copy of a layer's weights."""
        return self.copies.get(layer.path, frozenset())

    def __str__(self):
        lines = []
        for chunk in range(self.placement.last_chunk):
            there = f"{self.placement.describe(chunk)} → {self.placement.describe(chunk + 1)}"
            for x in self.sent_after(chunk):
                lines.append(f"{there}: {x.name} {'×'.join(map(str, x.shape))} {x.dtype}")
        return "\n".join(lines)

    @classmethod
    def of(cls, function: Callable, inputs, placement: Placement) -> "Dataflow":
        """Return the dataflow of a function of placed layers.

        Args:
            function: a function of `inputs` that returns nested tensors.
            inputs: nested tensors, or specs of known shapes: a micro-batch.
            placement: the `Placement`.

        Raises:
            ValueError: a chunk needs what a later one computes.
        """
        return _Recorder.run(function, inputs, placement).dataflow()

    @classmethod
    def of_network(cls, network: keras.Model, inputs, placement: Placement) -> "Dataflow":
        """Return the dataflow of a network's training step.

        Args:
            network: a `keras.Model`.
            inputs: nested tensors, or specs of known shapes: a micro-batch.
            placement: the `Placement`.

        Raises:
            ValueError: a chunk has no layers, or needs what a later one computes; or a
                layer with weights has no place.
        """
        function = lambda inputs: network(inputs, training=True)
        recorder = _Recorder.run(function, inputs, placement)
        _check_places(network, recorder.layers, placement)
        return recorder.dataflow()


def specs_of(tensors):
    """Return the specs of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tensors
    )


class _Recorder:
    """A view of calls: gives placeholder outputs, and remembers what inputs come from."""

    def __init__(self, placement):
        self._placement = placement
        self._names = CallNames()
        self._results = {}  # a placeholder's name -> (layer, number of the result, name, tensor)
        self._needed = []  # (layer, tensors)
        self.outputs = ()
        self.layers = []

    @classmethod
    def run(cls, function, inputs, placement):
        """Return a recorder of a function, run on nested tensors or specs."""
        recorder = cls(placement)

        def run(inputs):
            with view(recorder):
                recorder.outputs = function(inputs)

        tf.function(run, autograph=False).get_concrete_function(specs_of(inputs))
        return recorder

    def call(self, layer, compute, placeholder, args, kwargs):
        self.layers.append(layer)
        self._needed.append((layer, tf.nest.flatten((args, kwargs))))
        results = placeholder(layer, args, kwargs)
        flat = [tf.identity(x) for x in tf.nest.flatten(results)]
        name = self._names.next(layer)
        for number, x in enumerate(flat):
            self._results[x.name] = (layer, number, f"{name}:{number}", x)
        return tf.nest.pack_sequence_as(results, flat)

    def dataflow(self):
        """Return the `Dataflow`."""
        placement, copies, last_use = self._placement, {}, {}
        uses = [(chunk_of(layer, placement), layer.path, xs) for layer, xs in self._needed]
        outputs = placement.last_chunk, "the output", tf.nest.flatten(self.outputs)
        for chunk, user, tensors in [*uses, outputs]:
            for key in self._origins(tensors):
                layer, number, _, _ = self._results[key]
                first = chunk_of(layer, placement)
                if number in layer.results_that_are_weights:
                    if chunk != first:
                        copies[layer.path] = copies.get(layer.path, frozenset()) | {chunk}
                    continue
                if chunk < first:
                    raise ValueError(
                        f"{user} is on {placement.describe(chunk)} and needs what {layer.path} "
                        f"computes on {placement.describe(first)}: stages may not go backwards "
                        "along the network"
                    )
                last_use[key] = max(last_use.get(key, 0), chunk)
        tensors = []
        for key, last in last_use.items():
            layer, _, name, x = self._results[key]
            first = chunk_of(layer, placement)
            if last > first:
                tensors.append(CrossStageTensor(name, tuple(x.shape), x.dtype.name, first, last))
        return Dataflow(placement, tuple(tensors), copies, specs_of(self.outputs))

    def _origins(self, tensors):
        """Return the placeholders that tensors come from, without another in between."""
        found, seen, todo = {}, set(), [x for x in tensors if tf.is_tensor(x)]
        while todo:
            x = todo.pop()
            if x.name in seen:
                continue
            seen.add(x.name)
            if x.name in self._results:
                found[x.name] = True
            else:
                todo += list(x.op.inputs)
        return list(found)


def _check_places(network, placed, placement):
    used = {chunk_of(layer, placement) for layer in placed}
    for chunk in range(placement.num_chunks):
        if chunk not in used:
            raise ValueError(
                f"{placement.describe(chunk)} of {placement.num_chunks} has no layer with weights: "
                "change lambda_func or pipeline_stage"
            )
    inside = {id(inner) for layer in placed for inner in _compat.flat_layers(layer)}
    for layer in _compat.flat_layers(network):
        if _compat.own_variables(layer) and id(layer) not in inside:
            raise ValueError(
                f"{layer.path} has weights, but no place in the pipeline: set its pipeline_stage"
            )
