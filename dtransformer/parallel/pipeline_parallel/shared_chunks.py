"""Equal model chunks, compiled once and called with each chunk's weights.

DTensor's compilation time grows with the square of the number of operations in a function. A
compiled function cannot call another function twice, so chunks are called one by one. The trained
weights are DTensors that a tape watches outside of the function. The chunk passes them to the
function itself. Everything else is mapped by `EqualLayers`.
"""

import re

import keras

from dtransformer import _compat
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import get_chunk_layers, placed_layers
from dtransformer.parallel.tracing.equal_layers import EqualLayers, is_from_package


def find_equal_layers(
    network: keras.Model, chunk: int, dataflow: Dataflow
) -> tuple[tuple, EqualLayers] | None:
    """Return the blocks of a chunk that can share a compiled function with equal chunks.

    A chunk can share a function if it consists only of consecutive blocks of this package in one
    stack, without experts. Code between blocks then belongs to the stack and is identical. The
    first chunk and the last one cannot, because they use the batch.

    Args:
        network: Built `keras.Model`.
        chunk: Integer. Index of the model chunk.
        dataflow: `Dataflow` of the computation.

    Returns:
        A `(signature, layers)` tuple: a hashable value that is the same for equal chunks, and the
        `EqualLayers` of the chunk. `None` if the chunk cannot share a function.
    """
    placement = dataflow.placement
    has_copies = any(chunk in dataflow.get_copy_chunks(layer) for layer in placed_layers(network))
    if chunk in (0, placement.last_chunk) or has_copies:
        return None
    stack, layers = _find_blocks(network, get_chunk_layers(network, chunk, placement))
    if layers is None or _has_experts(layers.inner):
        return None
    received = dataflow.received_by(chunk)
    crossing = [
        (layers.role(x.name), x.shape, x.dtype) for x in (*received, *dataflow.sent_after(chunk))
    ]
    return (stack.path, layers.signature(), len(received), repr(crossing)), layers


def _find_blocks(network, blocks):
    """Return the stack with these consecutive blocks and their `EqualLayers`.

    Returns `(None, None)` if no stack contains the blocks, or if a layer in them is defined outside
    of this package.
    """
    for stack in _stacks(network):
        if blocks and blocks[0] in stack.blocks:
            first = stack.blocks.index(blocks[0])
            layers = EqualLayers(stack.blocks, first, first + len(blocks))
            if layers.layers == blocks and all(map(is_from_package, layers.inner)):
                return stack, layers
    return None, None


def count_blocks(network: keras.Model) -> int:
    """Return the number of blocks that can share functions.

    It counts the blocks in stacks of this package. With experts it is 0.
    """
    if _has_experts(_compat.flat_layers(network)):
        return 0
    return sum(len(stack.blocks) for stack in _stacks(network))


def _stacks(network):
    """Return the layers of this package with a list of blocks."""
    layers = filter(is_from_package, _compat.flat_layers(network))
    return [layer for layer in layers if isinstance(getattr(layer, "blocks", None), list)]


def _has_experts(layers):
    """Return whether one of the layers has experts, which report their loads under unique names."""
    return any(getattr(layer, "aux_loss_is_mean", False) for layer in layers)


class SharedChunk:
    """Compiled function of an equal chunk, called with this chunk's weights.

    It is called in the same way as functions compiled by `stage_devices`, with this chunk's names.

    Args:
        function: Function compiled for the other chunk.
        compiled_layers: `EqualLayers` of the other chunk.
        layers: `EqualLayers` of this chunk.
        trained: List of this chunk's trained weights.
        other_weights: List of this chunk's other weights.

    Attributes:
        compilation: The compiled function, which records compilations.
    """

    def __init__(
        self,
        function,
        compiled_layers: EqualLayers,
        layers: EqualLayers,
        trained: list,
        other_weights: list,
    ):
        self._function = self.compilation = function
        self._compiled_layers = compiled_layers
        self._layers = layers
        self.trained = trained
        self._other_weights = other_weights

    def weights(self) -> list:
        """Return the values of the trained weights, for gradients."""
        return self._function.weights(self.trained)

    def __call__(self, weights, received, *args):
        sent, results = self._function.call(
            weights,
            self.trained,
            self._other_weights,
            self._layers.rename_for(self._compiled_layers, received),
            self._function.put(self._layers.random_ids()),
            *args,
        )
        return self._compiled_layers.rename_for(self._layers, sent), results

    def layer_name(self, name: str) -> str:
        """Replace the names of stack and blocks in an operation name with this chunk's names."""
        for layer, compiled in zip(self._layers.layers, self._compiled_layers.layers):
            stack = layer.path.split("/")[-2]
            # TensorFlow appends numbers to repeated names.
            pattern = rf"/{re.escape(stack)}(?:_\d+)?/{re.escape(compiled.name)}(?:_\d+)?(?=/)"
            renamed = re.sub(pattern, f"/{stack}/{layer.name}", name)
            if renamed != name:
                return renamed
        return name
