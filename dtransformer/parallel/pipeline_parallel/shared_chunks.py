"""Model chunks that are alike are compiled once: one function is called for each of them.

DTensor compiles each function for its mesh, in a time that grows with the square of the number of
operations, and cannot call one function twice from another. Chunks are called one by one.
"""

import dataclasses
import re

import keras

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import layers_of, placed_layers
from dtransformer.parallel.tracing.dropout_seed import mask_drawers


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a chunk has in common with those that compute the same with other weights.

    Args:
        key: equal for chunks that are alike; hashable.
        roles: dict of the names of what crosses the chunk's borders and what they are to it, equal
            for chunks that are alike.
        dropouts: list of its layers whose masks are drawn by a number of their own.
        stack, blocks: the name of its stack, and the list of those of its blocks.
    """

    key: tuple
    roles: dict
    dropouts: list
    stack: str
    blocks: list

    def named_as_in(self, other: "Signature", tensors: dict) -> dict:
        """Return a dict of tensors by this chunk's names by those of a chunk that is like it."""
        names = {role: name for name, role in other.roles.items()}
        return {names[self.roles[name]]: x for name, x in tensors.items()}


def signature_of(network: keras.Model, chunk: int, dataflow: Dataflow) -> Signature | None:
    """Return what a chunk has in common with others; None where it may be like no other.

    It may where it is some blocks of this package that follow each other in a stack, and nothing
    else: the code between them is the stack's, and the same for all of them. The first chunk and
    the last one compute on the batch.

    Args:
        network: a `keras.Model`, built.
        chunk: number of the model chunk.
        dataflow: the `Dataflow` of the computation.
    """
    placement = dataflow.placement
    layers = layers_of(network, chunk, placement)
    has_copies = any(chunk in dataflow.copies_of(layer) for layer in placed_layers(network))
    stack = _stack_of(network, layers)
    if chunk in (0, placement.last_chunk) or has_copies or stack is None:
        return None
    inner = [one for layer in layers for one in _compat.flat_layers(layer)]
    if _any_tells_means(inner):
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
    return Signature(key, roles, mask_drawers(inner), stack.name, [layer.name for layer in layers])


def _stack_of(network, layers):
    """Return the stack of which layers are blocks that follow each other; None if there is none."""
    for stack in _stacks(network):
        if layers and layers[0] in stack.blocks:
            first = stack.blocks.index(layers[0])
            follow = stack.blocks[first : first + len(layers)] == layers
            inner = [one for layer in layers for one in _compat.flat_layers(layer)]
            return stack if follow and all(map(_is_ours, inner)) else None
    return None


def number_of_blocks(network: keras.Model) -> int:
    """Return how many blocks there are in stacks of this package; 0 where chunks are never alike."""
    if _any_tells_means(_compat.flat_layers(network)):
        return 0
    return sum(len(stack.blocks) for stack in _stacks(network))


def _stacks(network):
    """Return the layers of this package that hold a list of blocks."""
    ours = filter(_is_ours, _compat.flat_layers(network))
    return [layer for layer in ours if isinstance(getattr(layer, "blocks", None), list)]


def _any_tells_means(layers):
    """Return whether one of the layers is of experts, which tell their loads by their own names."""
    return any(getattr(layer, "adds_means", False) for layer in layers)


def _is_ours(layer):
    return type(layer).__module__.startswith("dtransformer.")


def _role(name, blocks, first):
    """Return what a result is to a chunk: of which block from its first one, or its name."""
    path, _, number = name.rpartition(":")
    numbers = {block.path: place - first for place, block in enumerate(blocks)}
    return (numbers[path], number) if path in numbers else name


class SharedChunk:
    """The compiled function of a chunk, which is that of another chunk with other weights.

    Called as what `stage_devices` compile, with this chunk's names.

    Args:
        function: what was compiled for the other chunk.
        other: the `Signature` of that chunk.
        own: the `Signature` of this one.
        trained, others: this chunk's weights, as `weights_of` returns them.

    Attributes:
        compilation: the function that is compiled, which says when and into what.
    """

    def __init__(self, function, other: Signature, own: Signature, trained: list, others: list):
        self._function = self.compilation = function
        self._other, self._own = other, own
        self.trained, self._others = trained, others

    def weights(self) -> list:
        """Return what gradients are taken of."""
        return self._function.weights(self.trained)

    def __call__(self, weights, received, *args):
        numbers = [layer.number for layer in self._own.dropouts]
        received = self._own.named_as_in(self._other, received)
        sent, results = self._function.call(
            weights, self.trained, self._others, received, self._function.put(numbers), *args
        )
        return self._other.named_as_in(self._own, sent), results

    def layer_name(self, name: str) -> str:
        """Return a name of the compiled function's with this chunk's blocks in it."""
        own, again = dict(zip(self._other.blocks, self._own.blocks)), r"(?:_\d+)?"
        stack, blocks = re.escape(self._own.stack), "|".join(map(re.escape, own))
        return re.sub(
            rf"/{stack}{again}/({blocks}){again}(?=/)",  # TensorFlow numbers names that come again
            lambda match: f"/{self._own.stack}/{own[match[1]]}",
            name,
        )
