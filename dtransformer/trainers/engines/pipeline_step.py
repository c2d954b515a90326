"""One training step of a pipeline stage, which executes the schedule's instructions."""

import dataclasses
import time

import tensorflow as tf

from dtransformer.parallel.mesh.function import new_functions
from dtransformer.parallel.pipeline_parallel.stage_assignment import local_chunks
from dtransformer.parallel.schedules.instruction import (
    FORWARD,
    RECEIVE_ACTIVATIONS,
    RECEIVES,
    SEND_ACTIVATIONS,
    SEND_GRADIENTS,
    SENDS,
    Instruction,
)
from dtransformer.parallel.schedules.timeline import Event
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from dtransformer.trainers.engines.accumulation import micro_batch_seed
from dtransformer.trainers.forward_step import with_zeros


class PipelineStep:
    """Training step of this rank's stage.

    Args:
        engine: The `PipelineEngine`.
        batches: List of micro-batches, tuples `(inputs, labels, sample_weight)` of device tensors.
        num_rows: Number of rows of each micro-batch, without rows that were added for the mesh.
        counts, loss_scale: Device tensors, see `StepScalars`.
        seed: Int64 tensor [2].

    Attributes:
        dataflow: The `Dataflow` of a micro-batch.
        sums: Dict of this stage's sums for the logs.
        events: List of the `Event`s of computations.
        sent: Dict that maps the name of each send to its start time.
        received: Dict that maps the name of each receive to its `Event`.
        compiled: List of `(function, names)` tuples if a chunk was compiled in this step, otherwise
            empty: the function of each chunk, and the names of its compiled TensorFlow functions.
    """

    def __init__(self, engine, batches, num_rows, counts, loss_scale, seed):
        self._engine = engine
        self._devices = engine.devices
        self._batches = batches
        self._num_rows = num_rows
        self._counts = counts
        self._loss_scale = loss_scale
        self._seed = seed
        self.dataflow = engine.dataflow(batches[0][0])
        self._last_chunk = self.dataflow.placement.last_chunk
        self._weights = {}  # Chunk -> tensors that gradients are computed for.
        self._tapes = {}  # (chunk, micro-batch) -> inputs of its backward pass.
        # (chunk, micro-batch) -> list of (kernel, input, output gradient).
        self._deferred_kernels = {}
        self._receives = {}  # Name of a receive -> future.
        self._sends = []
        self._border_tensors = {}  # Name of border tensors -> tensors, until they are used.
        self._gradients = {}  # Weight id -> list of this rank's shards.
        self._new_gradients = {}  # Gradients of the last backward pass, until they are added.
        self._outputs = []
        self.sums = {}
        self.events = []
        self.compiled = []
        self.sent = {}
        self.received = {}

    def run(self, instruction):
        """Execute an instruction."""
        self._started = time.time()
        if instruction.kind in SENDS:
            self._send(instruction)
        elif instruction.kind in RECEIVES:
            self._receive(instruction)
        else:
            self._add_gradients()  # Input gradients were sent to the previous stage before.
            getattr(self, f"_{instruction.kind}")(instruction)
            event = Event(self._engine.stage, instruction, self._started, time.time())
            self.events.append(event)

    def warm_up(self):
        """Run the first micro-batch on zeros instead of received tensors.

        All stages then compile at the same time, not in sequence.
        """
        for chunk in local_chunks():
            instruction = Instruction(FORWARD, 0, chunk)
            if chunk:
                crossing = self.dataflow.sent_after(chunk - 1)
                self._border_tensors[_activations(0, chunk - 1)] = self._zeros(crossing)
            self._forward(instruction)
            if (chunk, 0) in self._tapes:
                crossing = self.dataflow.gradients_after(chunk)
                self._border_tensors[_gradients(0, chunk)] = self._zeros(crossing)
                self._backward(instruction)
                if self._deferred_kernels[chunk, 0]:
                    self._weight_gradients(instruction)

    def _zeros(self, crossing):
        shards = [tf.zeros(*spec) for spec in self._devices.shard_specs(crossing)]
        return self._devices.from_shards(crossing, shards)

    def finish(self):
        """Wait for all sends, and record the end of all receives."""
        self._add_gradients()
        for sent in self._sends:
            sent.result()
        for name, event in self.received.items():
            end = self._engine.peers.ended[name]
            self.received[name] = dataclasses.replace(event, end=end)
        functions = [self._engine.function(chunk, self.dataflow) for chunk in self._weights]
        if any(function.compilation.is_new for function in functions):
            self.compiled = [
                (function, list(function.compilation.compiled)) for function in functions
            ]
            for function in functions:
                function.compilation.is_new = False

    def all_gradients(self):
        """Return for each trainable weight the list of its gradient's local shards."""
        weights = self._engine.network.trainable_variables
        gradients = [self._gradients.get(id(weight)) for weight in weights]
        return with_zeros(weights, gradients, lambda i: self._zero_shards(weights[i]))

    def _zero_shards(self, weight):
        zeros = [tf.zeros_like(shard.value) for shard in get_local_shards([weight])]
        return self._reduce({id(weight): zeros})[id(weight)]

    def _reduce(self, gradients):
        """Reduce shards of gradients, a dict from weight ids, if micro-batches are reduced."""
        if self._engine.reduce is None:
            return gradients
        with self._engine.recording(tuple(gradients)):
            return self._engine.reduce(gradients)

    def all_outputs(self):
        """Return the outputs of all micro-batches, or `None` without metrics or on other stages."""
        if not self._outputs:
            return None
        return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *self._outputs)

    # Tensors at the border between two chunks. They are sent and received, or passed on directly
    # if both chunks are on this stage.

    def _find_border(self, instruction):
        """Return the `CrossStageTensor`s of a send or a receive, and their common name."""
        kind = instruction.kind
        border = instruction.chunk - (kind in (RECEIVE_ACTIVATIONS, SEND_GRADIENTS))
        if kind in (SEND_ACTIVATIONS, RECEIVE_ACTIVATIONS):
            return self.dataflow.sent_after(border), _activations(instruction.micro_batch, border)
        return self.dataflow.gradients_after(border), _gradients(instruction.micro_batch, border)

    def _receive(self, instruction):
        crossing, name = self._find_border(instruction)
        specs = self._devices.shard_specs(crossing)
        self._receives[name] = self._engine.peers.receive(specs, instruction.peer, name)
        self.received[name] = Event(self._engine.stage, instruction, time.time(), None)

    def _send(self, instruction):
        crossing, name = self._find_border(instruction)
        shards = self._devices.shards(crossing, self._border_tensors.pop(name))
        self.sent[name] = time.time()
        self._sends.append(self._engine.peers.send(shards, instruction.peer, name))

    def _take_tensors(self, crossing, name):
        """Return the tensors at a border in the order of the `CrossStageTensor`s."""
        if name in self._border_tensors:
            return self._border_tensors.pop(name)
        shards = self._receives.pop(name).result()
        self._started = time.time()  # Exclude the waiting time from the event.
        return self._devices.from_shards(crossing, shards)

    # Computations.

    def _forward(self, instruction):
        k = instruction.micro_batch
        chunk = instruction.chunk
        devices = self._devices
        crossing = self.dataflow.received_by(chunk)
        received = self._take_tensors(crossing, _activations(k, chunk - 1)) if chunk else []
        seed = devices.put_scalars(micro_batch_seed(self._seed, k, len(self._batches)))
        function = self._engine.function(chunk, self.dataflow)
        if chunk not in self._weights:
            self._weights[chunk] = function.weights()
        weights = self._weights[chunk]
        names = [tensor.name for tensor in crossing]
        has_backward = chunk >= self._engine.first_trained
        received_trained = []
        if chunk > self._engine.first_trained:
            received_trained = [x for x, tensor in zip(received, crossing) if tensor.has_gradient]
        recording = self._engine.recording(f"forward {chunk}")
        with recording, tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*weights, *received_trained])
            sent, (loss, sums, outputs, deferred) = function(
                weights,
                dict(zip(names, received, strict=True)),
                *self._batches[k],
                self._counts,
                self._loss_scale,
                seed,
            )
        if chunk != self._last_chunk:
            crossing = self.dataflow.sent_after(chunk)
            self._border_tensors[_activations(k, chunk)] = [sent[x.name] for x in crossing]
        if has_backward:
            names = [tensor.name for tensor in self.dataflow.gradients_after(chunk)]
            trained = [sent[name] for name in names]
            untrained = [x for name, x in sent.items() if name not in names]
            unused = [x for x in tf.nest.flatten((sums, outputs, untrained)) if x is not None]
            unused = [x for x in unused if x.shape.rank and x.dtype.is_floating]
            self._tapes[chunk, k] = tape, trained, loss, unused, received_trained, deferred
        for name, x in sums.items():
            self.sums[name] = devices.local(x) + self.sums.get(name, 0.0)
        if outputs is not None:
            outputs = devices.local(outputs)
            self._outputs.append(tf.nest.map_structure(lambda x: x[: self._num_rows], outputs))

    def _backward(self, instruction):
        k = instruction.micro_batch
        chunk = instruction.chunk
        upstream = []
        if chunk != self._last_chunk:
            upstream = self._take_tensors(
                self.dataflow.gradients_after(chunk), _gradients(k, chunk)
            )
        tape, sent, loss, unused, received, deferred = self._tapes.pop((chunk, k))
        weights = self._weights[chunk]
        # Sums, outputs and results of frozen layers have no gradient. Pass zeros explicitly, because
        # the tape would create zeros that are not on the mesh.
        upstream = [*upstream, self._devices.put_loss_gradient(), *map(tf.zeros_like, unused)]
        with self._engine.recording(f"backward {chunk}"):
            all_gradients = tape.gradient([*sent, loss, *unused], [*weights, *received], upstream)
        gradients = all_gradients[: len(weights)]
        input_gradients = all_gradients[len(weights) :]
        self._devices.wait([x for x in all_gradients if x is not None])
        function = self._engine.function(chunk, self.dataflow)
        if function.compilation.is_new:  # The first backward pass compiles its gradient.
            function.compilation.compiled.extend(new_functions())
        if chunk > self._engine.first_trained:
            self._border_tensors[_gradients(k, chunk - 1)] = [
                tf.zeros_like(x) if gradient is None else gradient
                for x, gradient in zip(received, input_gradients, strict=True)
            ]
        trained = function.trained
        self._deferred_kernels[chunk, k] = [
            (weight, deferred[weight.path], dy)
            for weight, dy in zip(trained, gradients)
            if weight.path in deferred and dy is not None
        ]
        self._accumulate([(w, x) for w, x in zip(trained, gradients) if w.path not in deferred])

    def _weight_gradients(self, instruction):
        kernels = self._deferred_kernels.pop((instruction.chunk, instruction.micro_batch))
        gradients = self._engine.kernel_gradients([(x, dy) for _, x, dy in kernels])
        self._devices.wait(gradients)
        self._accumulate([(w, tf.reshape(x, w.shape)) for (w, _, _), x in zip(kernels, gradients)])

    def _accumulate(self, gradients):
        """Keep (weight, gradient) tuples until they are added; skip `None`."""
        self._add_gradients()
        self._new_gradients = {
            id(weight): self._devices.gradient_shards(weight, gradient)
            for weight, gradient in gradients
            if gradient is not None
        }

    def _add_gradients(self):
        """Add the gradients of the last backward pass to the gradients of other micro-batches."""
        if not self._new_gradients:
            return
        new = self._reduce(self._new_gradients)
        self._new_gradients = {}
        repeated = [key for key in new if key in self._gradients]
        old_shards = [self._gradients[key] for key in repeated]
        new_shards = [new[key] for key in repeated]
        totals = self._engine.add(old_shards, new_shards)
        self._gradients.update({**new, **dict(zip(repeated, totals))})


def _activations(k, border):
    """Return the name of a micro-batch's activations at the border after a chunk."""
    return f"activations_{k}_after_{border}"


def _gradients(k, border):
    """Return the name of a micro-batch's gradients at the border after a chunk."""
    return f"gradients_{k}_after_{border}"
