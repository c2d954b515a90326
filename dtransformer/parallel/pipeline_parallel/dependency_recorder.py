"""Runs a network once with placeholder outputs, to find out which layers need which results."""

import dataclasses

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.stage_dispatch import (
    CallNames,
    left_masks,
    mask_name,
    view,
    zeros_of,
)
from dtransformer.parallel.tracing.tensor_specs import tensor_specs


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a placed layer's call, or the mask that the call leaves on it.

    Args:
        layer: the layer.
        number: its number among the results of the call, flattened; None of a mask.
        name: str, the same on every rank.
        spec: its `tf.TensorSpec`.
    """

    layer: object
    number: int | None
    name: str
    spec: tf.TensorSpec

    @property
    def is_weight(self) -> bool:
        """Whether it is one of the layer's weights, which other chunks have copies of."""
        return self.number in self.layer.results_that_are_weights


class DependencyRecorder:
    """A view of calls: gives placeholder outputs, and remembers what inputs come from.

    Args:
        function: a function of `inputs` that calls placed layers and returns nested tensors.
        inputs: nested tensors, or specs of known shapes: a micro-batch.

    Attributes:
        calls: list of (layer, list of the `Result`s that it needs), in the order of the calls.
        ends: list of the `Result`s that the function's outputs come from.
        outputs: nested specs of the function's outputs.
    """

    def __init__(self, function, inputs):
        self._names = CallNames()
        self._results = {}  # a placeholder's name in the graph -> `Result`
        self.calls, self.ends, self.outputs = [], [], None

        def run(inputs):
            with view(self):
                outputs = function(inputs)
            self.ends = self._origins(outputs)
            self.outputs = tensor_specs(outputs)

        tf.function(run, autograph=False).get_concrete_function(tensor_specs(inputs))

    def call(self, layer, compute, placeholder, args, kwargs):
        self.calls.append((layer, self._origins((args, kwargs))))
        results = placeholder(layer, args, kwargs)
        flat = [tf.identity(x) for x in tf.nest.flatten(results)]
        name = self._names.next(layer)
        for number, x in enumerate(flat):
            self._remember(x, layer, number, f"{name}:{number}")
        for number, spec in left_masks(layer, compute, args, kwargs).items():
            mask = zeros_of(spec, args, kwargs)
            self._remember(mask, layer, None, mask_name(name, number))
            _compat.with_mask(flat[number], mask)
        return tf.nest.pack_sequence_as(results, flat)

    def _remember(self, x, layer, number, name):
        spec = tf.TensorSpec(x.shape, x.dtype)
        self._results[x.name] = Result(layer, number, name, spec)

    def _origins(self, tensors):
        """Return the results that nested tensors, and their masks, come from directly."""
        found, seen = {}, set()
        masks = list(_compat.masks_of(tensors).values())
        todo = [x for x in [*tf.nest.flatten(tensors), *masks] if tf.is_tensor(x)]
        while todo:
            x = todo.pop()
            if x.name in seen:
                continue
            seen.add(x.name)
            if x.name in self._results:
                found[x.name] = self._results[x.name]
            else:
                todo += list(x.op.inputs)
        return list(found.values())
