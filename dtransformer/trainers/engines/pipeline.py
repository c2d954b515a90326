"""The compute plane of a pipeline: carries the schedule's instructions out on this rank."""

import collections
import dataclasses

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.devices import device_type
from dtransformer.parallel.dropout_seed import dropout_seed
from dtransformer.parallel.dtensor.batch import num_rows
from dtransformer.parallel.object_collectives import all_gather_json
from dtransformer.parallel.pipeline import dataflow, placement, schedules
from dtransformer.parallel.pipeline.forward_pass import ForwardPass, from_last
from dtransformer.parallel.pipeline.p2p import PeerToPeer
from dtransformer.parallel.pipeline.simulator import ideal_of
from dtransformer.parallel.pipeline.stage_devices import stage_devices
from dtransformer.parallel.pipeline.timeline import Event, Timeline, most_alive, write
from dtransformer.parallel.same_batch import check_same_batch
from dtransformer.parallel.zero.gather import unsharding
from dtransformer.reports import audit
from dtransformer.trainers.data import input_specs, input_symbols
from dtransformer.trainers.engines.accumulation import check_rows, rows_of
from dtransformer.trainers.engines.pipeline_step import Step


class PipelineEngine:
    """Forward and backward of this rank's stage of the network.

    Args:
        step: the `ForwardStep`. Its network is built here, this stage's part of it.
    """

    compiles_itself = takes_micro_batches = True

    def __init__(self, step):
        self._forward_step, self.network = step, step.network
        self.stage, self.num_stages = job.stage()
        config = get_parallel_config()
        self.number = config.micro_batch_num
        self._instructions = schedules.instructions(
            config.pipeline_schedule, self.num_stages, self.number, config.pipeline_chunks
        )
        self.waits_for_messages = config.pipeline_chunks == 1 and device_type() == "CPU"
        self.devices, self.messages = stage_devices(), PeerToPeer()
        self._predict = ForwardPass(
            self.network, lambda inputs, _: (self.network(inputs, training=False), None), "call"
        )
        self._test = ForwardPass(self.network, self._outputs_and_sums, "test")
        self._plans = {}  # shapes of a micro-batch -> StagePlan
        self._functions = {}  # (part, plan) -> compiled
        self.add = tf.function(
            lambda total, more: tf.nest.map_structure(tf.add, total, more), autograph=False
        )
        # Of the last step: computations; messages' names, and when they were sent and came.
        self.events, self._sent, self._received = [], {}, {}
        self.input_shapes = self._copies = None
        self._compiled = []  # names of the functions of the step that was compiled last

    @property
    def last_part(self):
        """The number of the part that has the network's outputs, and the loss."""
        return placement.num_chunks() - 1

    def part_of(self, instruction):
        """Return the number of the part that an instruction of this stage is about."""
        return instruction.chunk * self.num_stages + self.stage

    def plan(self, inputs):
        """Return the `StagePlan` for a micro-batch, from its tensors or specs."""
        key = tuple(tf.nest.flatten(dataflow.specs_of(inputs)))
        if key not in self._plans:
            self._plans[key] = dataflow.Dataflow.of_network(
                self.network, inputs, placement.num_chunks()
            )
        return self._plans[key]

    def build(self, data):
        """Build this stage's part of the network, for what `fit` is given."""
        if not self.network.built:
            with placement.view(dataflow.BuildView()):
                self.network(input_symbols(data))
        if self._copies is None:
            dataflow.share_tables(self.network, input_specs(data))
            self._copies = self._shared_weights()

    def example_outputs(self):
        """Return zeros of the shapes and types of the outputs of a micro-batch."""
        specs = next(iter(self._plans.values())).outputs
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)

    def collectives(self):
        """Return the `Collective`s of a step: those on the mesh, and between the stages."""
        return self.number * audit.mesh_collectives(self._compiled) + self.messages_sent()

    def messages_sent(self):
        """Return the `Collective`s that are the messages of the last step."""
        plan, sent = self._last_plan, []
        for part in placement.own_chunks():
            borders = (plan.sent_after(part), False), (plan.received_by(part), True)
            for value, backward in [(v, is_back) for values, is_back in borders for v in values]:
                layer = value.name.split(":")[0].split("/", 1)[-1]
                sent += [
                    audit.Collective(
                        *("send/recv", "send/recv", tuple(shape), dtype),
                        *("stages", 2, layer, backward),
                    )
                    for shape, dtype in self.devices.message_specs([value])
                ]
        return self.number * sent

    @property
    def num_kept(self):
        """The number of micro-batches whose activations of all own parts are kept at once."""
        return most_alive(self._instructions[self.stage]) / len(placement.own_chunks())

    def timeline(self, path=None):
        """Return what all stages did in the last step; see `Trainer.timeline`."""
        received = {name: event.to_json() for name, event in self._received.items()}
        own = [event.to_json() for event in self.events], self._sent, received
        everyone = all_gather_json(own, "timeline")
        events, sent, received = zip(*(everyone[rank] for rank in job.pipeline_group().ranks))
        if not all(events):
            raise ValueError("no training step was run yet: call fit or train_on_batch first")
        events = [Event.from_json(event) for own in events for event in own]
        sent = collections.ChainMap(*sent)
        for own in received:  # a transfer begins once both ends are ready
            for name, event in own.items():
                event = Event.from_json(event)
                start = min(max(event.start, sent[name]), event.end)
                events.append(dataclasses.replace(event, start=start))
        timeline = Timeline(tuple(sorted(events, key=lambda e: e.start)), self.num_stages)
        if path is not None and job.is_chief():
            write(timeline, ideal_of(timeline, self._instructions), path)
        return timeline

    # A step's instructions.

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        """As `Engine.forward_backward`; gradients are those of this stage's weights."""
        count, loss_scale, seed = numbers
        batch = inputs, labels, sample_weight
        self._check(batch)
        rows = num_rows(batch)
        check_rows(rows)
        batches = [rows_of(batch, k, self.number, rows) for k in range(self.number)]
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(x.shape), batches[0][0])
        batches = [self.devices.put_batch(*one) for one in batches]
        put = [self.devices.put_numbers(x) for x in (count, loss_scale)]
        step = Step(self, batches, rows // self.number, *put, seed)
        for instruction in self._instructions[self.stage]:
            step.run(instruction)
        step.finish()
        self.events, self._sent, self._received = step.events, step.sent, step.received
        self._compiled = step.compiled or self._compiled
        self._last_plan = step.plan
        return self._add_copies(step.all_gradients()), step.all_outputs(), self._shared(step.sums)

    def _check(self, batch):
        self.devices.check(batch)
        check_same_batch(batch, job.pipeline_group(), "a pipeline")

    def function(self, part, plan):
        """Return the compiled forward pass of a part.

        It gives what the part sends on, its share of the loss, and at the last part sums
        and the outputs, where metrics want them.
        """
        key = part, self.devices.shapes(plan)
        if key not in self._functions:
            self._functions[key] = self.devices.compile(
                self._forward(part, plan), self.network, part
            )
        return self._functions[key]

    def _forward(self, part, plan):
        devices, step = self.devices, self._forward_step
        sent_values = {value.name: value for value in plan.sent_after(part)}
        received_values = {value.name: value for value in plan.received_by(part)}

        def forward(received, inputs, labels, sample_weight, count, loss_scale, seed):
            received = {name: devices.pin(received_values[name], x) for name, x in received.items()}
            view = dataflow.StageView(part, plan, received)
            with dropout_seed(devices.numbers(seed, [2])), unsharding("train"):
                with placement.view(view):
                    outputs = self.network(inputs, training=True)
            loss, sums = tf.zeros([]), {}
            if part == self.last_part:
                sums = step.sums(inputs, outputs, labels, sample_weight)
                loss = tf.math.divide_no_nan(sums["loss"], devices.numbers(count, []))
            for extra in placement.losses_of(self.network, part):
                loss += tf.cast(extra, "float32") / (job.data_shard()[1] * self.number)
            loss *= devices.numbers(loss_scale, [])
            sent = {name: devices.pin(sent_values[name], x) for name, x in view.sent.items()}
            if part != self.last_part or not step.keeps_outputs:
                outputs = None
            return sent, *devices.pin_whole((loss, sums, outputs))

        return forward

    def _shared_weights(self):
        """Return (number, path, group) of each weight of this stage that others have, too."""
        numbers = {id(w): i for i, w in enumerate(self.network.trainable_variables)}
        everyone = [job.topology().pipeline_group(r) for r in range(job.size())]
        shared = []
        for places, layer in placement.shared_weights(self.network):
            for ranks in dict.fromkeys(everyone):
                group = job.agreed_group(sorted(ranks[place] for place in places))
                if group.index is not None:
                    shared += [(numbers[id(w)], w.path, group) for w in layer.trainable_variables]
        return shared

    def _add_copies(self, gradients):
        """Add up the gradients of a table that several stages have; return one list of all."""
        hvd = job.horovod()
        for i, path, group in self._copies:
            gradients[i] = [
                hvd.allreduce(
                    shard, op=hvd.Sum, name=f"copies_{path}_{n}", process_set=group.process_set
                )
                for n, shard in enumerate(gradients[i])
            ]
        return [shard for shards in gradients for shard in shards]

    def _shared(self, sums):
        """Return the last stage's sums, on every stage."""
        names = ("loss", "count", "accuracy", "tokens", "flops")
        own = tf.stack([sums.get(name, tf.zeros([])) for name in names])
        known = tf.constant([float(name in sums) for name in names])
        own, known = tf.unstack(from_last(tf.stack([own, known]), "sums"))
        return {name: own[i] for i, name in enumerate(names) if float(known[i])}

    # Without gradients: the whole batch, from stage to stage.

    def evaluate(self, inputs, labels, sample_weight):
        """As `Engine.evaluate`; outputs where metrics want them, at the last stage."""
        self._check((inputs, labels, sample_weight))
        rows = num_rows((inputs, labels))
        batch = self.devices.put_batch(inputs, labels, sample_weight)
        (outputs, sums), _ = self._test(batch)
        outputs = tf.nest.map_structure(lambda x: None if x is None else x[:rows], outputs)
        return outputs, self._shared(sums)

    def _outputs_and_sums(self, batch, _):
        outputs, sums = self._forward_step.outputs_and_sums(*batch)
        return (outputs, sums) if placement.current_view().is_last else (None, {}), None

    def predict(self, inputs):
        """As `Engine.predict`."""
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        self._check(inputs)
        rows = num_rows(inputs)
        outputs, _ = self._predict(self.devices.put_rows(inputs))
        return tf.nest.map_structure(lambda x: x[:rows], from_last(outputs, "outputs"))
