"""Compiled functions of this rank's model chunks."""

import contextlib

from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.shared_chunks import SharedChunk, make_signature
from dtransformer.parallel.pipeline_parallel.stage_assignment import weights_of
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.tracing.dropout_seed import use_random_ids


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
        # Maps the key of a signature to the first chunk's signature and function.
        self._shared = {}

    def of(self, chunk: int, dataflow: Dataflow, variant=None):
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
            signature = make_signature(self._network, chunk, dataflow) if self._shares else None
            weights = weights_of(self._network, chunk, dataflow)
            if signature is None:
                function = self._function(chunk, dataflow)
                self._compiled[key] = self._devices.compile(function, *weights)
            else:
                self._compiled[key] = self._shared_chunk(
                    chunk, dataflow, signature, weights, variant
                )
        return self._compiled[key]

    def _shared_chunk(self, chunk, dataflow, signature, weights, variant):
        key = signature.key, variant
        if key not in self._shared:
            function = self._function(chunk, dataflow, signature.dropouts)
            self._shared[key] = signature, self._devices.compile(function, *weights)
        first_signature, function = self._shared[key]
        return SharedChunk(function, first_signature, signature, *weights)

    def _function(self, chunk, dataflow, dropouts=None):
        """Return the function to compile.

        With `dropouts`, it also takes the numbers of these layers.
        """
        crossing = [*dataflow.received_by(chunk), *dataflow.sent_after(chunk)]
        crossing = {tensor.name: tensor for tensor in crossing}

        def relayout(tensors):
            return {name: self._devices.relayout(crossing[name], x) for name, x in tensors.items()}

        def run(received, *args):
            chunk_view = ChunkView(chunk, dataflow, relayout(received))
            scope = contextlib.nullcontext()
            if dropouts is not None:
                packed_numbers, *args = args
                layer_numbers = self._devices.numbers(packed_numbers, [len(dropouts)])
                scope = use_random_ids({id(x): layer_numbers[i] for i, x in enumerate(dropouts)})
            with scope, view(chunk_view):
                results = self._compute(chunk, *args)
            return relayout(chunk_view.sent), results

        return run
