"""The compute plane of a pipeline: carries the schedule's instructions out on this rank."""

import time

import tensorflow as tf

from dtransformer.layers.dropout import dropout_seed
from dtransformer.parallel import audit, gathered, groups, runtime, stages
from dtransformer.parallel.computation import check_same_batch, num_rows
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.messages import Messages
from dtransformer.parallel.stage_devices import stage_devices
from dtransformer.parallel.stage_pass import StagePass, from_last
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.accumulation import check_rows, rows_of, seed_of
from dtransformer.trainers.data import input_specs, input_symbols
from dtransformer.trainers.pipeline import schedules
from dtransformer.trainers.pipeline.simulator import ideal_of
from dtransformer.trainers.pipeline.timeline import Event, Timeline, most_alive, write


def check_pipeline(config):
    """Check that the schedule of a config can be carried out.

    Raises:
        ValueError: see `schedules.check_schedule`.
    """
    if config.pipeline_stage > 1:
        schedules.check_schedule(*_schedule_of(config))


def _schedule_of(config):
    return (
        config.pipeline_schedule,
        config.pipeline_stage,
        config.micro_batch_num,
        config.pipeline_chunks,
    )


def check_trainer(objective, run_eagerly, jit_compile):
    """Check that stages can compute what a trainer is compiled with.

    Raises:
        ValueError: they cannot; says what to change.
    """
    if get_parallel_config().pipeline_stage == 1:
        return
    if not hasattr(objective, "token_weights"):
        raise ValueError(
            "a pipeline needs a loss whose weights do not depend on the outputs: use "
            "dtransformer.layers.CrossEntropyLoss, or pipeline_stage=1"
        )
    for name, value in {"run_eagerly": run_eagerly, "jit_compile": jit_compile is True}.items():
        if value:
            raise ValueError(f"{name}={value} does not work with a pipeline: leave it out")


class PipelinePlane:
    """Forward and backward of this rank's stage of the network.

    Args:
        trainer: the `Trainer`. Its network is built here, this stage's part of it.
    """

    def __init__(self, trainer):
        self._trainer, self._network = trainer, trainer.network
        self.stage, self.num_stages = runtime.stage()
        config = get_parallel_config()
        self.number = config.micro_batch_num
        self._instructions = schedules.instructions(*_schedule_of(config))
        self.devices, self.messages = stage_devices(), Messages()
        self._predict = StagePass(
            self._network, lambda inputs, _: (self._network(inputs, training=False), None), "call"
        )
        self._test = StagePass(self._network, self._outputs_and_sums, "test")
        self._plans = {}  # shapes of a micro-batch -> StagePlan
        self._functions = {}  # (part, plan) -> compiled
        self.add = tf.function(
            lambda total, more: tf.nest.map_structure(tf.add, total, more), autograph=False
        )
        self.events = []  # of the last step
        self.input_shapes = None
        self._compiled = []  # names of the functions of the step that was compiled last

    @property
    def last_part(self):
        """The number of the part that has the network's outputs, and the loss."""
        return stages.num_parts() - 1

    @property
    def is_last(self):
        """Whether this rank has the last part."""
        return self.last_part in stages.own_parts()

    def part_of(self, instruction):
        """Return the number of the part that an instruction of this stage is about."""
        return instruction.chunk * self.num_stages + self.stage

    def plan(self, inputs):
        """Return the `StagePlan` for a micro-batch, from its tensors or specs."""
        key = tuple(tf.nest.flatten(stages.specs_of(inputs)))
        if key not in self._plans:
            self._plans[key] = stages.StagePlan.of_network(
                self._network, inputs, stages.num_parts()
            )
        return self._plans[key]

    def build(self, data):
        """Build this stage's part of the network, for what `fit` is given."""
        if not self._network.built:
            with stages.view(stages.BuildView()):
                self._network(input_symbols(data))
        stages.share_tables(self._network, input_specs(data))
        self._copies = self._shared_weights()

    def example_of_outputs(self):
        """Return zeros of the shapes and types of the outputs of a micro-batch."""
        specs = next(iter(self._plans.values())).outputs
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)

    def collectives(self):
        """Return the `Collective`s on the mesh of the step that was compiled last."""
        return audit.mesh_collectives(self._compiled)

    def messages_sent(self):
        """Return the `Collective`s that are the messages of the last step."""
        plan, sent = self._last_plan, []
        for part in stages.own_parts():
            for values, backward in (
                (plan.sent_after(part), False),
                (plan.received_by(part), True),
            ):
                for value in values:
                    layer = value.name.split(":")[0].split("/", 1)[-1]
                    sent += [
                        audit.Collective(
                            *("message", "message", tuple(shape), tf.as_dtype(dtype).name),
                            *("stages", 2, layer, backward),
                        )
                        for shape, dtype in self.devices.message_specs(value)
                    ]
        return self.number * sent

    @property
    def num_kept(self):
        """The number of micro-batches whose activations of all own parts are kept at once."""
        return most_alive(self._instructions[self.stage]) / len(stages.own_parts())

    def timeline(self, path=None):
        """Return what all stages did in the last step; see `Trainer.timeline`."""
        events = runtime.horovod().allgather_object(self.events, name="timeline")
        events = [events[rank] for rank in runtime.pipeline_group().ranks]
        if not all(events):
            raise ValueError("no training step was run yet: call fit or train_on_batch first")
        events = sorted((e for own in events for e in own), key=lambda e: e.start)
        timeline = Timeline(tuple(events), self.num_stages)
        if path is not None and runtime.is_chief():
            write(timeline, ideal_of(timeline, self._instructions), path)
        return timeline

    # A step's instructions.

    def train(self, inputs, labels, sample_weight, count, loss_scale, seed):
        """As `Trainer._loss_and_gradients`; gradients are those of this stage's weights."""
        batch = inputs, labels, sample_weight
        self._check(batch)
        batches = self._micro_batches(batch)
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(x.shape), batches[0][0])
        numbers = [self.devices.put_numbers(x) for x in (count, loss_scale)]
        step = _Step(self, [self.devices.put_batch(*one) for one in batches], *numbers, seed)
        for instruction in self._instructions[self.stage]:
            step.run(instruction)
        step.finish()
        self.events, self._compiled = step.events, step.compiled or self._compiled
        self._last_plan = step.plan
        return self._add_copies(step.all_gradients()), step.all_outputs(), self._shared(step.sums)

    def _check(self, batch):
        self.devices.check(batch)
        check_same_batch(batch, runtime.pipeline_group(), "a pipeline")

    def _micro_batches(self, batch):
        rows = num_rows(batch)
        check_rows(rows)
        return [rows_of(batch, k, self.number, rows) for k in range(self.number)]

    def function(self, part, plan):
        """Return the compiled forward pass of a part.

        It gives what the part sends on, its share of the loss, and at the last part sums
        and the outputs, where metrics want them.
        """
        key = part, self.devices.shapes(plan)
        if key not in self._functions:
            self._functions[key] = self.devices.compile(
                self._forward(part, plan), self._network, part
            )
        return self._functions[key]

    def _forward(self, part, plan):
        devices, trainer = self.devices, self._trainer
        sent_values = {value.name: value for value in plan.sent_after(part)}
        received_values = {value.name: value for value in plan.received_by(part)}

        def forward(received, inputs, labels, sample_weight, count, loss_scale, seed):
            received = {name: devices.pin(received_values[name], x) for name, x in received.items()}
            view = stages.StageView(part, plan, received)
            with dropout_seed(devices.numbers(seed, [2])), gathered.reading("train"):
                with stages.view(view):
                    outputs = self._network(inputs, training=True)
            loss, sums = tf.zeros([]), {}
            if part == self.last_part:
                sums = trainer._sums(inputs, outputs, labels, sample_weight)
                loss = tf.math.divide_no_nan(sums["loss"], devices.numbers(count, []))
            for extra in stages.losses_of(self._network, part):
                loss += tf.cast(extra, "float32") / (runtime.data_shard()[1] * self.number)
            loss *= devices.numbers(loss_scale, [])
            sent = {name: devices.pin(sent_values[name], x) for name, x in view.sent.items()}
            if part != self.last_part or trainer._compile_metrics is None:
                outputs = None
            return sent, *devices.pin_whole((loss, sums, outputs))

        return forward

    def _shared_weights(self):
        """Return (number, path, group) of each weight of this stage that others have, too."""
        numbers = {id(w): i for i, w in enumerate(self._network.trainable_variables)}
        everyone = [runtime.topology().pipeline_group(r) for r in range(runtime.size())]
        shared = []
        for places, layer in stages.shared_weights(self._network):
            for ranks in dict.fromkeys(everyone):
                group = groups.agreed_group(sorted(ranks[place] for place in places))
                if group.index is not None:
                    shared += [(numbers[id(w)], w.path, group) for w in layer.trainable_variables]
        return shared

    def _add_copies(self, gradients):
        """Add up the gradients of a table that several stages have; return one list of all."""
        hvd = runtime.horovod()
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

    def test(self, inputs, labels, sample_weight):
        """As `Trainer._outputs_and_sums`; outputs where metrics want them, at the last stage."""
        self._check((inputs, labels, sample_weight))
        rows = num_rows((inputs, labels))
        batch = self.devices.put_batch(inputs, labels, sample_weight)
        (outputs, sums), _ = self._test(batch)
        outputs = tf.nest.map_structure(lambda x: None if x is None else x[:rows], outputs)
        return outputs, self._shared(sums)

    def _outputs_and_sums(self, batch, _):
        outputs, sums = self._trainer._outputs_and_sums(*batch)
        return (outputs, sums) if stages.current_view().is_last else (None, {}), None

    def predict(self, inputs):
        """As `Trainer.call`; on every rank."""
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        self._check(inputs)
        rows = num_rows(inputs)
        outputs, _ = self._predict(self.devices.put_rows(inputs))
        return tf.nest.map_structure(lambda x: x[:rows], from_last(outputs, "outputs"))


class _Step:
    """What a training step has while its instructions are carried out."""

    def __init__(self, plane, batches, count, loss_scale, seed):
        self._plane, self._devices, self._batches = plane, plane.devices, batches
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
        functions = [self._plane.function(part, self.plan) for part in self._weights]
        if any(function.is_new for function in functions):
            self.compiled = [name for function in functions for name in function.compiled]
            self.compiled += audit.new_functions()  # those of gradients
            for function in functions:
                function.is_new = False

    def all_gradients(self):
        """Return a list of what this rank has of each weight's gradient."""
        weights = self._plane._network.trainable_variables
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
        values = self.plan.sent_after(border)
        specs = [spec for value in values for spec in self._devices.message_specs(value)]
        self._arriving[name] = self._plane.messages.receive(specs, one.peer, name)

    def _send_activations(self, one):
        self._send(one, self._activations_after(self._plane.part_of(one), one.micro_batch))

    def _send_gradients(self, one):
        self._send(one, self._gradients_after(self._plane.part_of(one) - 1, one.micro_batch))

    def _send(self, one, name):
        self._leaving.append(self._plane.messages.send(self._results.pop(name), one.peer, name))

    def _arrived(self, border, name):
        """Wait for a message; return the `Value`s that pass a border and their tensors."""
        parts = iter(self._arriving.pop(name).result())
        self._started = time.time()  # what comes before is waiting
        values = self.plan.sent_after(border)
        return values, [
            self._devices.from_message(
                value, [next(parts) for _ in self._devices.message_specs(value)]
            )
            for value in values
        ]

    def _to_message(self, values, tensors):
        return [
            x for v, tensor in zip(values, tensors) for x in self._devices.to_message(v, tensor)
        ]

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
        self._results[self._activations_after(part, k)] = self._to_message(values, sent)
        for name, x in sums.items():
            self.sums[name] = self._devices.result(x) + self.sums.get(name, 0.0)
        if outputs is not None:
            self._outputs.append(self._devices.result(outputs))

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
        self._results[self._gradients_after(part - 1, k)] = self._to_message(
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
