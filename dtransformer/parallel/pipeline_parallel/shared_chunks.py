"""Equal model chunks, compiled once and called with each chunk's weights.

DTensor's compilation time grows with the square of the number of operations in a function. One
function cannot call another function twice, so chunks are called one by one.
"""

import dataclasses
import re

import keras

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import layers_of, placed_layers
from dtransformer.parallel.tracing.dropout_seed import random_layers


@dataclasses.dataclass(frozen=True)
class Signature:
    """Description of a chunk that is equal for chunks with the same computation.

    Args:
        key: Hashable value. Equal chunks have equal keys.
        roles: Dict that maps the names of tensors that enter or leave the chunk to their roles.
            Equal chunks have equal roles.
        dropouts: List of the chunk's layers whose dropout masks depend on a layer number.
        stack: Name of the chunk's stack.
        blocks: List of the names of its blocks.
    """

    key: tuple
    roles: dict
    dropouts: list
    stack: str
    blocks: list

    def rename_for(self, other: "Signature", tensors: dict) -> dict:
        """Rename the keys of a dict of tensors to the names of an equal chunk."""
        names = {role: name for name, role in other.roles.items()}
        return {names[self.roles[name]]: x for name, x in tensors.items()}


def make_signature(network: keras.Model, chunk: int, dataflow: Dataflow) -> Signature | None:
    """Return the signature of a chunk, or `None` if it cannot share a function.

    A chunk can share a function if it consists only of consecutive blocks of this package in one
    stack. Code between blocks then belongs to the stack and is identical. The first chunk and the
    last one cannot, because they use the batch.

    Args:
        network: Built `keras.Model`.
        chunk: Integer. Index of the model chunk.
        dataflow: `Dataflow` of the computation.
    """
    placement = dataflow.placement
    layers = layers_of(network, chunk, placement)
    has_copies = any(chunk in dataflow.copies_of(layer) for layer in placed_layers(network))
    stack = _find_stack(network, layers)
    if chunk in (0, placement.last_chunk) or has_copies or stack is None:
        return None
    inner = [layer_inside for layer in layers for layer_inside in _compat.flat_layers(layer)]
    if _has_experts(inner):
        return None
    blocks = list(stack.blocks)
    first = blocks.index(layers[0])
    roles = {}
    for tensor in (*dataflow.received_by(chunk), *dataflow.sent_after(chunk)):
        roles[tensor.name] = _role(tensor.name, blocks, first)
    crossing = [
        [(roles[x.name], x.shape, x.dtype) for x in tensors]
        for tensors in (dataflow.received_by(chunk), dataflow.sent_after(chunk))
    ]
    key = (
        stack.path,
        tuple(type(layer) for layer in inner),
        repr([{**layer.get_config(), "name": None} for layer in inner]),
        tuple((tuple(w.shape), w.dtype, w.trainable) for layer in layers for w in layer.variables),
        repr(crossing),
    )
    return Signature(key, roles, random_layers(inner), stack.name, [layer.name for layer in layers])


def _find_stack(network, layers):
    """Return the stack that contains the layers as consecutive blocks, or `None`."""
    for stack in _stacks(network):
        if layers and layers[0] in stack.blocks:
            first = stack.blocks.index(layers[0])
            are_consecutive = stack.blocks[first : first + len(layers)] == layers
            inner = [
                layer_inside for layer in layers for layer_inside in _compat.flat_layers(layer)
            ]
            return stack if are_consecutive and all(map(_is_dtransformer_layer, inner)) else None
    return None


def number_of_blocks(network: keras.Model) -> int:
    """Return the number of blocks that can share functions.

    It counts the blocks in stacks of this package. With experts it is 0.
    """
    if _has_experts(_compat.flat_layers(network)):
        return 0
    return sum(len(stack.blocks) for stack in _stacks(network))


def _stacks(network):
    """Return the layers of this package with a list of blocks."""
    layers = filter(_is_dtransformer_layer, _compat.flat_layers(network))
    return [layer for layer in layers if isinstance(getattr(layer, "blocks", None), list)]


def _has_experts(layers):
    """Return whether one of the layers has experts, which report their loads under unique names."""
    return any(getattr(layer, "adds_means", False) for layer in layers)


def _is_dtransformer_layer(layer):
    return type(layer).__module__.startswith("dtransformer.")


def _role(name, blocks, first):
    """Return the role of a result: its block relative to the chunk's first one, or its name."""
    path, _, result_index = name.rpartition(":")
    offsets = {block.path: place - first for place, block in enumerate(blocks)}
    return (offsets[path], result_index) if path in offsets else name


class SharedChunk:
    """Compiled function of an equal chunk, called with this chunk's weights.

    It is called in the same way as functions compiled by `stage_devices`, with this chunk's names.

    Args:
        function: Function compiled for the other chunk.
        other: `Signature` of the other chunk.
        own: `Signature` of this chunk.
        trained: List of this chunk's trained weights.
        others: List of this chunk's other weights.

    Attributes:
        compilation: The compiled function, which records compilations.
    """

    def __init__(
        self,
        function,
        other_signature: Signature,
        signature: Signature,
        trained: list,
        other_weights: list,
    ):
        self._function = self.compilation = function
        self._other_signature = other_signature
        self._signature = signature
        self.trained = trained
        self._other_weights = other_weights

    def weights(self) -> list:
        """Return the values of the trained weights, for gradients."""
        return self._function.weights(self.trained)

    def __call__(self, weights, received, *args):
        layer_numbers = [layer.random_id for layer in self._signature.dropouts]
        received = self._signature.rename_for(self._other_signature, received)
        sent, results = self._function.call(
            weights,
            self.trained,
            self._other_weights,
            received,
            self._function.put(layer_numbers),
            *args,
        )
        return self._other_signature.rename_for(self._signature, sent), results

    def layer_name(self, name: str) -> str:
        """Replace the names of stack and blocks in an operation name with this chunk's names."""
        new_names = dict(zip(self._other_signature.blocks, self._signature.blocks))
        suffix = r"(?:_\d+)?"
        stack = re.escape(self._signature.stack)
        blocks = "|".join(map(re.escape, new_names))
        return re.sub(
            # TensorFlow appends numbers to repeated names.
            rf"/{stack}{suffix}/({blocks}){suffix}(?=/)",
            lambda match: f"/{self._signature.stack}/{new_names[match[1]]}",
            name,
        )
