"""Computations without gradients that go through all stages of a pipeline."""

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.pipeline import dataflow, placement
from dtransformer.parallel.pipeline.p2p import PeerToPeer
from dtransformer.parallel.pipeline.stage_devices import stage_devices
from dtransformer.parallel.zero.gather import unsharding


class ForwardPass:
    """A function of a network's layers that each stage computes its parts of, in turn.

    Args:
        network: a `keras.Model`, built.
        function: a function of (inputs, state) that returns outputs, nested tensors, and a
            state: what the part that is computed keeps for the next call, nested tensors
            of its placed layers. The state that it gets is None in the first call, and
            when what passes between the stages is found out.
        name: str, of its messages.

    Attributes:
        devices: where this rank's stage computes.
    """

    def __init__(self, network, function, name):
        self._network, self._function, self._name = network, function, name
        self.devices, self._messages = stage_devices(), PeerToPeer()
        self._plans, self._functions = {}, {}

    @property
    def is_last(self):
        """Whether this rank has the outputs."""
        return placement.num_chunks() - 1 in placement.own_chunks()

    def __call__(self, inputs, states=None):
        """Compute on every rank of the pipeline.

        Args:
            inputs: nested tensors, the same on every stage; on a mesh DTensors.
            states: what the last call has returned of them; None at first.

        Returns:
            The outputs, right on the last stage only, see `from_last`; and the states.
        """
        plan, new_states, leaving = self._plan(inputs), {}, []
        for part in placement.own_chunks():
            state = None if states is None else states[part]
            function = self._compiled(part, plan, state)
            received = self._receive(plan, part)
            outputs, sent, new_states[part] = function(function.weights(), received, inputs, state)
            if part < plan.num_parts - 1:
                values = plan.sent_after(part)
                parts = self.devices.to_message(values, [sent[value.name] for value in values])
                leaving.append(
                    self._messages.send(parts, placement.stage_after(part), self._at(part))
                )
        for message in leaving:
            message.result()
        return self.devices.result(outputs), new_states

    def _plan(self, inputs):
        key = tuple(tf.nest.flatten(dataflow.specs_of(inputs)))
        if key not in self._plans:
            outputs = lambda inputs: self._function(inputs, None)[0]
            self._plans[key] = dataflow.Dataflow.of(outputs, inputs, placement.num_chunks())
        return self._plans[key]

    def _at(self, part):
        """Return the name of the message after a part."""
        return f"{self._name}_after_{part}"

    def _receive(self, plan, part):
        if not part:
            return {}
        values = plan.received_by(part)
        specs = self.devices.message_specs(values)
        name, peer = self._at(part - 1), placement.stage_before(part)
        parts = self._messages.receive(specs, peer, name).result()
        tensors = self.devices.from_message(values, parts)
        return {value.name: x for value, x in zip(values, tensors)}

    def _compiled(self, part, plan, state):
        key = part, self.devices.shapes(plan), state is None
        if key not in self._functions:
            devices, values = self.devices, {v.name: v for v in plan.sent_after(part)}

            def compute(received, inputs, state):
                with unsharding(self._name):
                    with placement.view(dataflow.StageView(part, plan, received)) as view:
                        outputs, state = self._function(inputs, state)
                sent = {name: devices.pin(values[name], x) for name, x in view.sent.items()}
                return devices.pin_whole(outputs), sent, state

            self._functions[key] = devices.compile(compute, self._network, part)
        return self._functions[key]


def from_last(tensors, name):
    """Return the last stage's nested tensors on every stage of the pipeline.

    Args:
        tensors: nested tensors, of the same shapes on every stage.
        name: str, the same on every stage.
    """
    group = job.pipeline_group()
    if group.size == 1:
        return tensors
    flat = [
        flat_shards.carried(x, "broadcast", group, f"{name}_{number}", root_rank=group.ranks[-1])
        for number, x in enumerate(tf.nest.flatten(tensors))
    ]
    return tf.nest.pack_sequence_as(tensors, flat)
