"""One training step of a pipeline stage: its instructions are carried out here."""

import concurrent.futures
import dataclasses
import time

import tensorflow as tf

from dtransformer.parallel.dtensor.function import new_functions
from dtransformer.parallel.pipeline import schedules
from dtransformer.parallel.pipeline.timeline import Event
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.engines.accumulation import seed_of

# Most that a stage on CPUs waits until a message has left. The threads that send it share the
# cores with its next computation, beside which they need three times as long. With one chunk a
# stage the receiver waits for it; with more it has other work, and so has this one.
_SECONDS_TO_LEAVE = 0.01


class Step:
    """A training step of this rank's stage.

    Args:
        plane: the `PipelinePlane`.
        batches: list of the micro-batches, each (inputs, labels, sample_weight) as compiled
            functions take them.
        num_rows: number of rows of each, those that were added for the mesh not counted.
        count, loss_scale: numbers as compiled functions take them.
        seed: int32 tensor [2].

    Attributes:
        plan: the `StagePlan` of a micro-batch.
        sums: dict of what the last stage's logs are made of.
        events: list of the `Event`s of computations.
        sent: dict of the names of messages and when they were sent.
        received: dict of the names of messages and the `Event` of their coming.
        compiled: names of the functions that were compiled, if any were.
    """

    def __init__(self, plane, batches, num_rows, count, loss_scale, seed):
        self._plane, self._devices = plane, plane.devices
        self._batches, self._num_rows = batches, num_rows
        self._count, self._loss_scale, self._seed = count, loss_scale, seed
        self.plan = plane.plan(batches[0][0])
        self._weights = {}  # part -> what gradients are taken of
        self._tapes = {}  # (part, micro-batch) -> what its backward pass needs
        self._arriving = {}  # name of a message -> future
        self._leaving = []
        self._results = {}  # name of a message -> tensors
        self._gradients = {}  # id of a weight -> list of what this rank has of it
        self._outputs = []
        self.sums, self.events, self.compiled = {}, [], []
        self.sent, self.received = {}, {}

    def run(self, instruction):
        """Carry an instruction out."""
        self._started = time.time()
        getattr(self, f"_{instruction.kind}")(instruction)
        if instruction.kind in schedules.COMPUTATIONS:
            event = Event(self._plane.stage, instruction, self._started, time.time())
            self.events.append(event)

    def finish(self):
        """Wait until everything has left."""
        for message in self._leaving:
            message.result()
        for name, event in self.received.items():
            end = self._plane.messages.ended[name]
            self.received[name] = dataclasses.replace(event, end=end)
        functions = [self._plane.function(part, self.plan) for part in self._weights]
        if any(function.is_new for function in functions):
            self.compiled = [name for function in functions for name in function.compiled]
            self.compiled += new_functions()  # those of gradients
            for function in functions:
                function.is_new = False

    def all_gradients(self):
        """Return a list of what this rank has of each weight's gradient."""
        weights = self._plane.network.trainable_variables
        gradients = [self._gradients.get(id(weight)) for weight in weights]
        grads.check_used(weights, gradients)
        return gradients

    def all_outputs(self):
        """Return the outputs of all micro-batches; None where they are not wanted, or not here."""
        if not self._outputs:
            return None
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *self._outputs)

    # Messages: what passes the border after a part, forwards or backwards.

    def _activations_after(self, part, k):
        return f"activations_{k}_after_{part}"

    def _gradients_after(self, part, k):
        return f"gradients_{k}_after_{part}"

    def _receive_activations(self, one):
        border = self._plane.part_of(one) - 1
        self._receive(one, border, self._activations_after(border, one.micro_batch))

    def _receive_gradients(self, one):
        border = self._plane.part_of(one)
        self._receive(one, border, self._gradients_after(border, one.micro_batch))

    def _receive(self, one, border, name):
        specs = self._devices.message_specs(self.plan.sent_after(border))
        self._arriving[name] = self._plane.messages.receive(specs, one.peer, name)
        self.received[name] = Event(self._plane.stage, one, time.time(), None)

    def _send_activations(self, one):
        self._send(one, self._activations_after(self._plane.part_of(one), one.micro_batch))

    def _send_gradients(self, one):
        self._send(one, self._gradients_after(self._plane.part_of(one) - 1, one.micro_batch))

    def _send(self, one, name):
        self.sent[name] = time.time()
        self._leaving.append(self._plane.messages.send(self._results.pop(name), one.peer, name))
        if self._plane.waits_for_messages:
            concurrent.futures.wait(self._leaving[-1:], _SECONDS_TO_LEAVE)

    def _arrived(self, border, name):
        """Wait for a message; return the `Value`s that pass a border and their tensors."""
        parts = self._arriving.pop(name).result()
        self._started = time.time()  # what comes before is waiting
        values = self.plan.sent_after(border)
        return values, self._devices.from_message(values, parts)

    # Computations.

    def _forward(self, one):
        k, plane, part = one.micro_batch, self._plane, self._plane.part_of(one)
        values, received = [], []
        if part:
            values, received = self._arrived(part - 1, self._activations_after(part - 1, k))
        seed = self._devices.put_numbers(seed_of(self._seed, k, plane.number))
        function = plane.function(part, self.plan)
        if part not in self._weights:
            self._weights[part] = function.weights()
        weights = self._weights[part]
        with tf.GradientTape() as tape:
            tape.watch([*weights, *received])
            by_name = {value.name: x for value, x in zip(values, received)}
            sent, loss, sums, outputs = function(
                weights, by_name, *self._batches[k], self._count, self._loss_scale, seed
            )
        values = self.plan.sent_after(part)
        sent = [sent[value.name] for value in values]
        self._tapes[part, k] = tape, sent, loss, received
        self._results[self._activations_after(part, k)] = self._devices.to_message(values, sent)
        for name, x in sums.items():
            self.sums[name] = self._devices.result(x) + self.sums.get(name, 0.0)
        if outputs is not None:
            outputs = self._devices.result(outputs)
            self._outputs.append(tf.nest.map_structure(lambda x: x[: self._num_rows], outputs))

    def _backward(self, one):
        k, plane, part = one.micro_batch, self._plane, self._plane.part_of(one)
        upstream = []
        if part != plane.last_part:
            _, upstream = self._arrived(part, self._gradients_after(part, k))
        tape, sent, loss, received = self._tapes.pop((part, k))
        weights = self._weights[part]
        found = tape.gradient(
            [*sent, loss], [*weights, *received], [*upstream, self._devices.put_one()]
        )
        gradients, passed = found[: len(weights)], found[len(weights) :]
        self._devices.wait([x for x in found if x is not None])
        values = self.plan.received_by(part)
        self._results[self._gradients_after(part - 1, k)] = self._devices.to_message(
            values, [tf.zeros_like(x) if g is None else g for x, g in zip(received, passed)]
        )
        self._add_up(plane.function(part, self.plan).trained, gradients)

    def _add_up(self, weights, gradients):
        new = {
            id(weight): self._devices.shards_of(weight, gradient)
            for weight, gradient in zip(weights, gradients)
            if gradient is not None
        }
        known = [key for key in new if key in self._gradients]
        totals = self._plane.add(*([own[key] for key in known] for own in (self._gradients, new)))
        self._gradients.update({**new, **dict(zip(known, totals))})

    def _reduce(self, one):
        """The update plane does it, with all gradients."""

    _update = _reduce
