"""A computation of a network, compiled for each of this rank's model chunks."""

from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import weights_of
from dtransformer.parallel.pipeline_parallel.stage_dispatch import ChunkView, view


class ChunkFunctions:
    """What single model chunks do of a computation, compiled when it is first asked for.

    Args:
        network: a `keras.Model`, built.
        compute: a function of (chunk, *args) that calls the network's layers and returns nested
            results of the chunk.
        devices: where this rank's stage computes, see `stage_devices`.
    """

    def __init__(self, network, compute, devices):
        self._network, self._compute, self._devices = network, compute, devices
        self._compiled = {}

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
            weights = weights_of(self._network, chunk, dataflow)
            function = self._function(chunk, dataflow)
            self._compiled[key] = self._devices.compile(function, *weights)
        return self._compiled[key]

    def _function(self, chunk, dataflow):
        """Return what is compiled."""
        crossing = [*dataflow.received_by(chunk), *dataflow.sent_after(chunk)]
        crossing = {tensor.name: tensor for tensor in crossing}

        def relayout(tensors):
            return {name: self._devices.relayout(crossing[name], x) for name, x in tensors.items()}

        def run(received, *args):
            calls = ChunkView(chunk, dataflow, relayout(received))
            with view(calls):
                results = self._compute(chunk, *args)
            return relayout(calls.sent), results

        return run
