"""Computations without gradients that run through all stages of a pipeline."""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.pipeline_parallel.chunk_functions import ChunkFunctions
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.p2p import peers
from dtransformer.parallel.pipeline_parallel.stage_assignment import has_outputs, local_chunks
from dtransformer.parallel.pipeline_parallel.stage_devices import stage_devices
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.tensor_specs import tensor_specs
from dtransformer.parallel.zero.gather import unsharding


class ForwardPass:
    """Function of a network's layers whose model chunks run one after another.

    Args:
        network: Built `keras.Model`.
        function: Function of `(inputs, state)` that returns `(outputs, state)`. Outputs are nested
            tensors. The state is nested tensors that the current chunk's placed layers keep for the
            next call. The state argument is `None` in the first call and while the dataflow is
            traced.
        name: String. Name of the transfers.
        shares: Whether equal chunks may share a function. See `ChunkFunctions`.

    Attributes:
        devices: Executor of this rank's stage.
        empty_state: State of a chunk without any state, set by the first call.
    """

    empty_state = None

    def __init__(self, network, function, name, shares=False):
        self._function = function
        self._name = name
        self.devices = stage_devices()
        self._peers = peers()
        self._functions = ChunkFunctions(network, self._compute, self.devices, shares)
        self._dataflows = {}

    def __call__(self, inputs, states=None):
        """Run the function on every rank of the pipeline.

        Args:
            inputs: Nested tensors, identical on all stages. DTensors on a mesh.
            states: States from the last call. `None` in the first call.

        Returns:
            An `(outputs, states)` tuple. Outputs are zeros except on the last stage. See
            `from_last`.
        """
        dataflow = self._dataflow(inputs)
        new_states = {}
        pending_sends = []
        placement = dataflow.placement
        for chunk in local_chunks():
            if not chunk:
                tensors = {}
            elif not placement.is_local(chunk - 1):
                tensors = self._receive(dataflow, chunk)
            state = None if states is None else states[chunk]
            function = self._functions.get(chunk, dataflow, state is None)
            tensors, (outputs, new_states[chunk]) = function(
                function.weights(), tensors, inputs, state
            )
            if chunk != placement.last_chunk and not placement.is_local(chunk):
                pending_sends.append(self._send(dataflow, chunk, tensors))
        for sent in pending_sends:
            sent.result()
        if has_outputs():
            return self.devices.local(outputs), new_states
        return zeros_like(dataflow.outputs), new_states

    def _compute(self, chunk, inputs, state):
        with unsharding(self._name):
            outputs, state = self._function(inputs, state)
        is_last = chunk == job.placement().last_chunk
        return self.devices.replicate(outputs) if is_last else None, state

    def _dataflow(self, inputs):
        key = tuple(tf.nest.flatten(tensor_specs(inputs)))
        if key not in self._dataflows:
            self._dataflows[key] = Dataflow.from_function(self._outputs, inputs, job.placement())
        return self._dataflows[key]

    def _outputs(self, inputs):
        outputs, self.empty_state = self._function(inputs, None)
        return outputs

    def _name_after(self, chunk):
        return f"{self._name}_after_{chunk}"

    def _send(self, dataflow, chunk, passing):
        crossing = dataflow.sent_after(chunk)
        shards = self.devices.shards(crossing, [passing[tensor.name] for tensor in crossing])
        peer = dataflow.placement.stage_after(chunk)
        return self._peers.send(shards, peer, self._name_after(chunk))

    def _receive(self, dataflow, chunk):
        crossing = dataflow.received_by(chunk)
        peer = dataflow.placement.stage_before(chunk)
        specs = self.devices.shard_specs(crossing)
        shards = self._peers.receive(specs, peer, self._name_after(chunk - 1)).result()
        tensors = self.devices.from_shards(crossing, shards)
        return {tensor.name: x for tensor, x in zip(crossing, tensors)}


def zeros_like(specs):
    """Return zeros for nested specs. `None` values are kept."""
    return tf.nest.map_structure(
        lambda spec: None if spec is None else tf.zeros(spec.shape, spec.dtype), specs
    )


def from_last(tensors, name: str):
    """Broadcast nested tensors from the stage with the network's outputs to all stages.

    Args:
        tensors: Nested tensors of the same shapes on all stages.
        name: String, identical on all stages.
    """
    group = job.pipeline_group()
    placement = job.placement()
    if group.size == 1:
        return tensors
    root = placement.get_stage(placement.last_chunk)
    flat = [
        transport.broadcast(x, root, group, f"{name}_{i}")
        for i, x in enumerate(tf.nest.flatten(tensors))
    ]
    return tf.nest.pack_sequence_as(tensors, flat)
