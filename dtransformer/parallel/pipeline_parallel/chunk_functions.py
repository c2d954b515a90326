"""Compiled functions of this rank's model chunks."""

import contextlib

from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.shared_chunks import SharedChunk, find_equal_layers
from dtransformer.parallel.pipeline_parallel.stage_assignment import get_chunk_weights
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view


class ChunkFunctions:
    """Functions of single model chunks, compiled on first use.

    Args:
        network: Built `keras.Model`.
        compute: Function of `(chunk, *args)` that calls the network's layers and returns nested
            results of the chunk.
        devices: Executor of this rank's stage. See `stage_devices`.
        shares: Whether equal chunks may share a function on a mesh. The result of `compute` must
            not depend on the chunk index. Defaults to `False`.
    """

    def __init__(self, network, compute, devices, shares=False):
        self._network = network
        self._compute = compute
        self._devices = devices
        self._shares = shares and devices.compiles_whole_graphs
        self._compiled = {}
        # Maps the signature of equal chunks and the variant to the function and the layers of the
        # first chunk.
        self._shared = {}

    def get(self, chunk: int, dataflow: Dataflow, variant=None):
        """Return the compiled function of a chunk.

        Args:
            chunk: Integer. Index of the model chunk.
            dataflow: `Dataflow` of the computation.
            variant: Hashable value. A different value compiles the function again. Defaults to
                `None`.

        Returns:
            A function of `(weights, received, *args)` that returns a dict of tensors to send, by
            the names in `dataflow.sent_after(chunk)`, and the results of `compute`. `weights` is
            the result of its method `weights`. `received` is a dict by the names in
            `dataflow.received_by(chunk)`.
        """
        key = chunk, self._devices.cache_key(dataflow), variant
        if key not in self._compiled:
            self._compiled[key] = self._compile(chunk, dataflow, variant)
        return self._compiled[key]

    def _compile(self, chunk, dataflow, variant):
        weights = get_chunk_weights(self._network, chunk, dataflow)
        equal = find_equal_layers(self._network, chunk, dataflow) if self._shares else None
        if equal is None:
            return self._devices.compile(self._function(chunk, dataflow), *weights)
        signature, layers = equal
        key = signature, variant
        if key not in self._shared:
            function = self._devices.compile(self._function(chunk, dataflow, layers), *weights)
            self._shared[key] = function, layers
        function, compiled_layers = self._shared[key]
        return SharedChunk(function, compiled_layers, layers, *weights)

    def _function(self, chunk, dataflow, layers=None):
        """Return the function to compile.

        With `layers`, an `EqualLayers`, it also takes the ids of their random layers.
        """
        crossing = [*dataflow.received_by(chunk), *dataflow.sent_after(chunk)]
        crossing = {tensor.name: tensor for tensor in crossing}

        def relayout(tensors):
            return {name: self._devices.relayout(crossing[name], x) for name, x in tensors.items()}

        def run(received, *args):
            chunk_view = ChunkView(chunk, dataflow, relayout(received))
            scope = contextlib.nullcontext()
            if layers is not None:
                packed_ids, *args = args
                ids = self._devices.unpack_scalars(packed_ids, [len(layers.random_layers)])
                scope = layers.use_random_ids(ids)
            with scope, view(chunk_view):
                results = self._compute(chunk, *args)
            return relayout(chunk_view.sent), results

        return run
