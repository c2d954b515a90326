"""The compute plane of a pipeline: carries the schedule's instructions out on this rank."""

import time

import tensorflow as tf

from dtransformer.layers.dropout import dropout_seed
from dtransformer.parallel import gathered, groups, runtime, stages
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.slices import carried
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.accumulation import rows_of, seed_of
from dtransformer.trainers.pipeline import schedules
from dtransformer.trainers.pipeline.messages import Messages
from dtransformer.trainers.pipeline.simulator import ideal_of
from dtransformer.trainers.pipeline.timeline import Event, Timeline, write


def check_pipeline(config):
    """Check that the schedule of a config can be carried out.

    Raises:
        ValueError: see `schedules.check_schedule`.
    """
    if config.pipeline_stage > 1:
        schedules.check_schedule(
            config.pipeline_schedule, config.pipeline_stage, config.micro_batch_num
        )


def check_trainer(objective, metrics, run_eagerly, jit_compile):
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
    wrong = {"metrics": metrics, "run_eagerly": run_eagerly, "jit_compile": jit_compile is True}
    for name, value in wrong.items():
        if value:
            raise ValueError(f"{name}={value} does not work with a pipeline: leave it out")


class PipelinePlane:
    """Forward and backward of this rank's stage of the network.

    Args:
        trainer: the `Trainer`. Its network is built here, this stage's part of it.
    """

    def __init__(self, trainer):
        self._trainer, self._network = trainer, trainer.network
        self.stage, self._num_stages = runtime.stage()
        config = get_parallel_config()
        self._number = config.micro_batch_num
        self._instructions = schedules.instructions(
            config.pipeline_schedule, self._num_stages, self._number
        )
        self._plans = {}  # shapes of a micro-batch -> StagePlan
        self._functions = {}  # (function, shapes) -> compiled
        self._messages = Messages()
        self._sum = tf.function(
            lambda total, more: [a + b for a, b in zip(total, more)], reduce_retracing=True
        )
        self.events = []  # of the last step
        self.input_shapes = None

    @property
    def is_last(self):
        """Whether this rank has the last stage: the network's outputs, and the loss."""
        return self.stage == self._num_stages - 1

    def plan(self, inputs):
        """Return the `StagePlan` for a micro-batch, from its tensors or specs."""
        key = tuple((tuple(x.shape), x.dtype.name) for x in tf.nest.flatten(inputs))
        if key not in self._plans:
            self._plans[key] = stages.StagePlan.of(self._network, inputs, self._num_stages)
        return self._plans[key]

    def build(self, inputs):
        """Build this stage's part of the network, for a batch of inputs."""
        if not self._network.built:
            self._network.build()
        self.plan(inputs)
        for layer in self._network._flatten_layers():
            if self.stage in getattr(layer, "stages_with_copies", ()) and not layer.weights:
                layer.built = False
                layer.build((None, None))
        self._copies = self._shared_weights()

    def timeline(self, path=None):
        """Return what all stages did in the last step; see `Trainer.timeline`."""
        events = runtime.horovod().allgather_object(self.events, name="timeline")
        events = [events[rank] for rank in runtime.pipeline_group().ranks]
        if not all(events):
            raise ValueError("no training step was run yet: call fit or train_on_batch first")
        events = sorted((e for own in events for e in own), key=lambda e: e.start)
        timeline = Timeline(tuple(events), self._num_stages)
        if path is not None and runtime.is_chief():
            write(timeline, ideal_of(timeline, self._instructions), path)
        return timeline

    # A step's instructions.

    def train(self, inputs, labels, sample_weight, count, loss_scale, seed):
        """As `Trainer._loss_and_gradients`; gradients are those of this stage's weights."""
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
        batches = self._micro_batches((inputs, labels, sample_weight))
        step = _Step(self, batches, count, loss_scale, seed)
        for instruction in self._instructions[self.stage]:
            step.run(instruction)
        step.finish()
        self.events = step.events
        return self._add_copies(step.gradients), None, self._shared(step.sums)

    def _micro_batches(self, batch):
        rows = tf.nest.flatten(batch[0])[0].shape[0]
        if rows % self._number:
            raise ValueError(
                f"a batch of {rows} rows a data shard cannot be divided into "
                f"micro_batch_num={self._number} equal micro-batches, as a pipeline needs: use a "
                "multiple of them"
            )
        return [rows_of(batch, k, self._number, rows) for k in range(self._number)]

    def forward(self, received, batch, count, loss_scale, seed):
        """Return what the stage sends on, its part of the loss, and sums at the last one."""
        inputs, labels, sample_weight = batch
        plan = self.plan(inputs)

        def compute(received, inputs, labels, sample_weight, count, loss_scale, seed):
            view = stages.StageView(self.stage, plan, received)
            with dropout_seed(seed), gathered.reading("train"), stages.view(view):
                outputs = self._network(inputs, training=True)
            loss, sums = tf.zeros([]), {}
            if self.is_last:
                sums = self._trainer._sums(inputs, outputs, labels, sample_weight)
                loss = tf.math.divide_no_nan(sums["loss"], count)
            for extra in self._network.losses:
                loss += tf.cast(extra, "float32") / (runtime.data_shard()[1] * self._number)
            return view.sent, loss * loss_scale, sums

        compute = self._compiled("forward", compute, plan)
        return compute(received, inputs, labels, sample_weight, count, loss_scale, seed)

    def _compiled(self, name, function, plan):
        """Return the function compiled for a plan, that of its first call."""
        key = name, id(plan)
        if key not in self._functions:
            self._functions[key] = tf.function(function, autograph=False)
        return self._functions[key]

    def _shared_weights(self):
        """Return (number, path, group) of each weight of this stage that others have, too."""
        ranks, shared = runtime.pipeline_group().ranks, []
        numbers = {id(w): i for i, w in enumerate(self._network.trainable_variables)}
        for layer in self._network._flatten_layers():
            places = getattr(layer, "stages_with_copies", None)
            if places:
                places = sorted({stages.stage_of(layer, self._num_stages), *places})
                if self.stage in places:
                    group = groups.known_group([ranks[place] for place in places])
                    shared += [(numbers[id(w)], w.path, group) for w in layer.trainable_variables]
        return shared

    def _add_copies(self, gradients):
        """Add up the gradients of a table that several stages have."""
        hvd = runtime.horovod()
        for i, path, group in self._copies:
            gradients[i] = hvd.allreduce(
                gradients[i], op=hvd.Sum, name=f"copies_{path}", process_set=group.process_set
            )
        return gradients

    def _shared(self, sums):
        """Return the last stage's sums, on every stage."""
        group = runtime.pipeline_group()
        names = ("loss", "count", "accuracy", "tokens", "flops")
        own = tf.stack([sums.get(name, tf.zeros([])) for name in names])
        known = tf.constant([float(name in sums) for name in names])
        both = carried(
            tf.stack([own, known]),
            "broadcast",
            group,
            "sums_of_last_stage",
            root_rank=group.ranks[-1],
        )
        return {name: both[0, i] for i, name in enumerate(names) if float(both[1, i])}

    # Without gradients: the whole batch, from stage to stage.

    def test(self, inputs, labels, sample_weight):
        """As `Trainer._outputs_and_sums`."""
        outputs = self._pass_on(inputs)
        sums = {}
        if self.is_last:
            sums = self._trainer._sums(inputs, outputs, labels, sample_weight)
        return None, self._shared(sums)

    def predict(self, inputs):
        """As `Trainer.call`; on every rank."""
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        outputs, group = self._pass_on(inputs), runtime.pipeline_group()
        return carried(outputs, "broadcast", group, "outputs", root_rank=group.ranks[-1])

    def _pass_on(self, inputs):
        plan = self.plan(inputs)

        def compute(received, inputs):
            view = stages.StageView(self.stage, plan, received)
            with gathered.reading("call"), stages.view(view):
                return self._network(inputs, training=False), view.sent

        received = {}
        if self.stage:
            values = plan.received_by(self.stage)
            specs = [(value.shape, value.dtype) for value in values]
            message = self._messages.receive(specs, self.stage - 1, "inference")
            received = {v.name: x for v, x in zip(values, message.result())}
        outputs, sent = self._compiled("inference", compute, plan)(received, inputs)
        if not self.is_last:
            values = [sent[value.name] for value in plan.sent_after(self.stage)]
            self._messages.send(values, self.stage + 1, "inference").result()
        return outputs


class _Step:
    """What a training step has while its instructions are carried out."""

    def __init__(self, plane, batches, count, loss_scale, seed):
        self._plane, self._batches = plane, batches
        self._count, self._loss_scale, self._seed = count, loss_scale, seed
        self._plan = plane.plan(batches[0][0])
        self._weights = plane._network.trainable_variables
        self._sources = [gathered.source(weight) for weight in self._weights]
        self._tapes = {}  # micro-batch -> what its backward pass needs
        self._arriving = {}  # (kind of receive, micro-batch) -> future
        self._leaving = []
        self._results = {}
        self.gradients, self.sums, self.events = None, {}, []

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

    def _receive_activations(self, one):
        specs = [(v.shape, v.dtype) for v in self._plan.received_by(self._plane.stage)]
        self._receive(one, specs)

    def _receive_gradients(self, one):
        specs = [(v.shape, v.dtype) for v in self._plan.sent_after(self._plane.stage)]
        self._receive(one, specs)

    def _receive(self, one, specs):
        name = f"{one.kind.removeprefix('receive_')}_{one.micro_batch}_from_{one.peer}"
        future = self._plane._messages.receive(specs, one.peer, name)
        self._arriving[one.kind, one.micro_batch] = future

    def _send_activations(self, one):
        self._send(one)

    def _send_gradients(self, one):
        self._send(one)

    def _send(self, one):
        kind = one.kind.removeprefix("send_")
        name = f"{kind}_{one.micro_batch}_from_{self._plane.stage}"
        tensors = self._results.pop((kind, one.micro_batch))
        self._leaving.append(self._plane._messages.send(tensors, one.peer, name))

    def _forward(self, one):
        k, plane = one.micro_batch, self._plane
        received = {}
        if plane.stage:
            values = self._plan.received_by(plane.stage)
            message = self._arriving.pop((schedules.RECEIVE_ACTIVATIONS, k))
            received = {v.name: x for v, x in zip(values, message.result())}
            self._started = time.time()  # what comes before is waiting
        seed = seed_of(self._seed, k, plane._number)
        with tf.GradientTape() as tape:
            tape.watch([*received.values(), *self._sources])
            sent, loss, sums = plane.forward(
                received, self._batches[k], self._count, self._loss_scale, seed
            )
        sent = [sent[value.name] for value in self._plan.sent_after(plane.stage)]
        self._tapes[k] = tape, sent, loss, list(received.values())
        self._results["activations", k] = sent
        self.sums = {name: x + self.sums.get(name, 0.0) for name, x in sums.items()}

    def _backward(self, one):
        k, plane = one.micro_batch, self._plane
        upstream = []
        if not plane.is_last:
            upstream = self._arriving.pop((schedules.RECEIVE_GRADIENTS, k)).result()
            self._started = time.time()
        tape, sent, loss, received = self._tapes.pop(k)
        found = tape.gradient([*sent, loss], [*self._sources, *received], [*upstream, tf.ones([])])
        gradients, passed = found[: len(self._sources)], found[len(self._sources) :]
        grads.check_used(self._weights, gradients)
        self._results["gradients", k] = [
            tf.zeros_like(x) if g is None else g for x, g in zip(received, passed)
        ]
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        if self.gradients is not None:
            gradients = plane._sum(self.gradients, gradients)
        self.gradients = gradients

    def _reduce(self, one):
        """The update plane does it, with all gradients."""

    _update = _reduce
