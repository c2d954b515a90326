"""A computation of a network, compiled for each of this rank's model chunks."""

import contextlib

from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.shared_chunks import SharedChunk, signature_of
from dtransformer.parallel.pipeline_parallel.stage_assignment import weights_of
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view
from dtransformer.parallel.tracing.dropout_seed import dropout_numbers


class ChunkFunctions:
    """What single model chunks do of a computation, compiled when it is first asked for.

    Args:
        network: a `keras.Model`, built.
        compute: a function of (chunk, *args) that calls the network's layers and returns nested
            results of the chunk.
        devices: where this rank's stage computes, see `stage_devices`.
        shares: whether chunks that are alike may share a function, on a mesh: what `compute` gives
            must not depend on which of them it is.
    """

    def __init__(self, network, compute, devices, shares=False):
        self._network, self._compute, self._devices = network, compute, devices
        self._shares = shares and devices.compiles_whole_graphs
        self._compiled = {}
        self._shared = {}  # key of a `Signature` -> the first chunk's, and its function

    def of(self, chunk: int, dataflow: Dataflow, variant=None):
        """Return the compiled function of a chunk.

        Args:
            chunk: number of the model chunk.
            dataflow: the `Dataflow` of the computation.
            variant: what else differs where the function is compiled anew; hashable.

        Returns:
            A function of (weights, received, *args) that returns a dict of what the chunk sends
            on, by the names of `dataflow.sent_after(chunk)`, and the results of `compute`.
            The weights are what its method `weights` returns, `received` a dict by the names
            of `dataflow.received_by(chunk)`.
        """
        key = chunk, self._devices.cache_key(dataflow), variant
        if key not in self._compiled:
            signature = signature_of(self._network, chunk, dataflow) if self._shares else None
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
        other, function = self._shared[key]
        return SharedChunk(function, other, signature, *weights)

    def _function(self, chunk, dataflow, dropouts=None):
        """Return what is compiled; with a list of dropout layers it takes their numbers, too."""
        crossing = [*dataflow.received_by(chunk), *dataflow.sent_after(chunk)]
        crossing = {tensor.name: tensor for tensor in crossing}

        def relayout(tensors):
            return {name: self._devices.relayout(crossing[name], x) for name, x in tensors.items()}

        def run(received, *args):
            calls = ChunkView(chunk, dataflow, relayout(received))
            drawn = contextlib.nullcontext()
            if dropouts is not None:
                put, *args = args
                numbers = self._devices.numbers(put, [len(dropouts)])
                drawn = dropout_numbers({id(x): numbers[i] for i, x in enumerate(dropouts)})
            with drawn, view(calls):
                results = self._compute(chunk, *args)
            return relayout(calls.sent), results

        return run
