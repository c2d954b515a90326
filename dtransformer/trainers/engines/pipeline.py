"""Engine for a pipeline: runs the instructions of this rank's stage."""

import contextlib
import dataclasses
import functools
import itertools

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.collectives.replica_consistency import ReplicaConsistency
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.batch import num_rows
from dtransformer.parallel.ops.split_backward import kernel_gradients, splitting_backward
from dtransformer.parallel.pipeline_parallel.build import build_stage
from dtransformer.parallel.pipeline_parallel.chunk_functions import ChunkFunctions
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.forward_pass import ForwardPass, from_last, zeros_like
from dtransformer.parallel.pipeline_parallel.measured_timeline import gather_timeline
from dtransformer.parallel.pipeline_parallel.p2p import peers
from dtransformer.parallel.pipeline_parallel.stage_assignment import (
    get_chunk_layers,
    get_chunk_losses,
    get_chunk_weights,
    has_state,
    local_chunks,
)
from dtransformer.parallel.pipeline_parallel.stage_devices import stage_devices
from dtransformer.parallel.pipeline_parallel.stage_dispatch import current_chunk
from dtransformer.parallel.pipeline_parallel.stage_weights import SharedGradients
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.parallel.schedules import schedules
from dtransformer.parallel.schedules.instruction import SEND_GRADIENTS, SENDS, without_backward
from dtransformer.parallel.schedules.simulator import ideal_timeline
from dtransformer.parallel.schedules.timeline import max_stored_micro_batches, write
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import tensor_specs
from dtransformer.parallel.zero.gather import unsharding
from dtransformer.reports import audit
from dtransformer.trainers.data import check_rows, input_specs, input_symbols
from dtransformer.trainers.engines.base import Engine
from dtransformer.trainers.engines.pipeline_step import PipelineStep
from dtransformer.trainers.forward_step import check_any_trained
from dtransformer.trainers.row_sharding import take_shard


class PipelineEngine(Engine):
    """Engine that runs forward and backward passes of this rank's pipeline stage.

    Args:
        step: The `ForwardStep`. `build` builds only this stage's layers of its network.
    """

    takes_micro_batches = True

    def __init__(self, step):
        self._step = step
        self.network = step.network
        self.placement = job.placement()
        self.stage = job.stage()[0]
        config = get_parallel_config()
        self._num_micro_batches = config.micro_batch_num
        self._divides_backward = schedules.SCHEDULES[config.pipeline_schedule].divides_backward
        self._instructions = schedules.instructions(
            config.pipeline_schedule, self.placement, self._num_micro_batches
        )
        self.devices = stage_devices()
        self.peers = peers()
        # Compiled forward pass of a chunk, from its index and the `Dataflow`.
        self.function = ChunkFunctions(self.network, self._forward, self.devices, shares=True).get
        self._predict = ForwardPass(
            self.network, lambda x, _: (step.outputs(x, layers=self._layers()), None), "call", True
        )
        self._evaluate = ForwardPass(
            self.network, lambda batch, _: self._outputs_and_sums(*batch), "test", shares=True
        )
        self._dataflows = {}  # Specs of a micro-batch -> Dataflow.
        self._is_prepared = False
        self.add = tf.function(
            lambda total, more: tf.nest.map_structure(tf.add, total, more), autograph=False
        )
        self.kernel_gradients = tf.function(
            kernel_gradients, autograph=False, reduce_retracing=True
        )
        self._shared = self._example = None
        self._sum_shapes = {}  # "train" or "test" -> dict of names and shapes.
        self._compiled = []  # The last compilation, see `PipelineStep.compiled`.
        # Dataflow and events of the last step: computations, starts of sends, and receives.
        self._last_dataflow = None
        self._last_events = ([], {}, {})
        self._consistency = ReplicaConsistency()
        self._graphs = {}  # Part of a step -> list of its graphs with collectives between ranks.
        self.reduce = None  # Compiled reduction of a micro-batch's gradients.
        self._gathers_on_mesh = config.mesh_spans_data and config.optimizer_shard == 3

    def build(self, first):
        """Build this stage's layers; see `Engine.build`."""
        if self._shared is None:
            symbols = functools.partial(input_symbols, first)
            self._example = build_stage(self.network, symbols, input_specs(first))
            self._shared = SharedGradients(self.network)
            self._skip_frozen_chunks()

    def _skip_frozen_chunks(self):
        """Remove backward passes before the first chunk with a trainable weight."""
        trained = [
            chunk
            for chunk in local_chunks()
            if get_chunk_weights(self.network, chunk, self._example)[0]
        ]
        gathered = all_gather_json(trained, "trained")
        self.first_trained = min(itertools.chain(*gathered), default=self.placement.num_chunks)
        self._instructions = [
            without_backward(instructions, self.first_trained)
            for instructions in self._instructions
        ]

    # Training step.

    def forward_backward(self, inputs, labels, sample_weight, scalars, reduction=None):
        """See `Engine.forward_backward`. Gradients belong to this stage's weights.

        Args:
            reduction: `Reduction` of the gradients of each micro-batch, or `None`.
        """
        if reduction is not None and self.reduce is None:
            self.reduce = tf.function(reduction.reduce_weights, autograph=False)
        check_any_trained(self.first_trained < self.placement.num_chunks)
        batch = (inputs, labels, sample_weight)
        self._consistency.check(batch, "train")
        rows = num_rows(batch)
        check_rows(rows)
        m = self._num_micro_batches
        batches = [take_shard(batch, k, m) for k in range(m)]
        self.input_shapes = tf.nest.map_structure(lambda x: tuple(x.shape), batches[0][0])
        batches = [self.devices.put_batch(*micro_batch) for micro_batch in batches]
        counts = self.devices.put_scalars(scalars.counts)
        loss_scale = self.devices.put_scalars(scalars.loss_scale)
        step_args = (batches, rows // m, counts, loss_scale, scalars.seed)
        self._prepare(*step_args)
        step = PipelineStep(self, *step_args)
        for instruction in self._instructions[self.stage]:
            step.run(instruction)
        step.finish()
        self._last_dataflow = step.dataflow
        self._last_events = step.events, step.sent, step.received
        self._compiled = step.compiled or self._compiled
        gradients = self._shared.add_up(step.all_gradients())
        gradients = [shard for shards in gradients for shard in shards]
        is_first = "train" not in self._sum_shapes
        sums = self._reduce_over_stages(step.sums, "train")
        if is_first:  # Reading the sums blocks, so only the first step is checked.
            self._check_added_loss(sums)
        return gradients, step.all_outputs(), sums

    def _prepare(self, *step_args):
        """Compile this stage's chunks before it waits for other stages."""
        # Layers may communicate, so all ranks must do this in the same step, the first.
        is_first = not self._is_prepared
        self._is_prepared = True
        if not is_first or self.placement.num_stages == 1:
            return
        if not any(has_state(self.network, chunk, self.placement) for chunk in local_chunks()):
            step = PipelineStep(self, *step_args)
            step.warm_up()
            step.finish()
            self._compiled = step.compiled or self._compiled

    def dataflow(self, inputs):
        """Return the `Dataflow` of a micro-batch with these input tensors or specs."""
        key = tuple(tf.nest.flatten(tensor_specs(inputs)))
        if key not in self._dataflows:
            self._dataflows[key] = Dataflow.from_network(self.network, inputs, self.placement)
        return self._dataflows[key]

    def _forward(self, chunk, inputs, labels, sample_weight, counts, loss_scale, seed):
        """Return a chunk's local loss, sums, outputs for metrics and deferred kernel gradients.

        Only the last chunk has outputs.
        """
        devices = self.devices
        step = self._step
        job.record_compilation()
        deferring = splitting_backward() if self._divides_backward else contextlib.nullcontext({})
        unsharded = contextlib.nullcontext()
        if step.layout.unshards_weights or self._gathers_on_mesh:
            unsharded = unsharding("train")
        forward = trace.training_forward(devices.unpack_scalars(seed, [2]))
        with unsharded, forward as reported, deferring as deferred:
            outputs, changes = step.outputs_and_states(inputs, True, self._layers(chunk))
        sums = step.layer_sums(changes, inputs, counts, reported)
        if chunk == self.placement.last_chunk:
            batch = inputs, outputs, labels, sample_weight
            sums |= step.sums(*batch, counts, training=True)
        outputs = step.metric_outputs(outputs) if chunk == self.placement.last_chunk else None
        losses = get_chunk_losses(self.network, chunk, self.placement)
        sums["added"] = step.added_loss(losses, inputs, counts)
        loss = (sums.get("loss", 0.0) + sums["added"]) * devices.unpack_scalars(loss_scale, [])
        return devices.replicate((loss, sums, outputs, deferred))

    def _layers(self, chunk=None):
        """Return the layers of a model chunk, by default the current one."""
        chunk = current_chunk() if chunk is None else chunk
        return get_chunk_layers(self.network, chunk, self.placement)

    def _reduce_over_stages(self, sums, kind):
        """Return on every stage the sums over all stages, and this stage's state changes."""
        states = {name: value for name, value in sums.items() if name.startswith("states/")}
        sums = {name: value for name, value in sums.items() if name not in states}
        if kind not in self._sum_shapes:  # The names do not change from step to step.
            local_shapes = {name: list(value.shape) for name, value in sums.items()}
            shapes = {}
            for rank_shapes in all_gather_json(local_shapes, "names_of_sums"):
                shapes.update(rank_shapes)
            self._sum_shapes[kind] = dict(sorted(shapes.items()))
        shapes = self._sum_shapes[kind]
        flat = [tf.reshape(sums.get(name, tf.zeros(shape)), [-1]) for name, shape in shapes.items()]
        totals = transport.all_reduce(tf.concat(flat, 0), "Sum", job.pipeline_group(), "sums")
        totals = tf.split(totals, [x.shape[0] for x in flat])
        totals = {name: tf.reshape(x, shape) for (name, shape), x in zip(shapes.items(), totals)}
        return totals | states

    def _check_added_loss(self, sums):
        """Check that layers add no losses if the loss normalizer depends on the forward pass.

        Other stages would need the normalizer before their backward passes.

        Raises:
            ValueError: If layers have added losses to such a loss.
        """
        if "normalizer_ratio" in sums and float(sums["added"]):
            raise ValueError(
                "A pipeline cannot combine a loss that is a mean over a mask with losses that "
                "layers add. Use sample weights and `reduction='mean_with_sample_weight'` instead "
                "of the mask, or set `pipeline_stage=1`."
            )

    # Evaluation and prediction: the full batch passes from stage to stage.

    def evaluate(self, inputs, labels, sample_weight, counts):
        """See `Engine.evaluate`. Only the last stage returns outputs."""
        self._consistency.check((inputs, labels, sample_weight), "test")
        rows = num_rows((inputs, labels))
        batch = self.devices.put_batch(inputs, labels, sample_weight)
        (outputs, sums), chunk_sums = self._evaluate((*batch, self.devices.put_scalars(counts)))
        outputs = tf.nest.map_structure(lambda x: None if x is None else x[:rows], outputs)
        for added in chunk_sums.values():
            for name, x in self.devices.local(added).items():
                sums[name] = sums.get(name, 0.0) + x
        return outputs, self._reduce_over_stages(sums, "test")

    def _outputs_and_sums(self, inputs, labels, sample_weight, counts):
        """Return the last chunk's results and the sums of the current chunk's layers."""
        outputs, changes = self._step.outputs_and_states(inputs, layers=self._layers())
        sums = self._step.sums(inputs, outputs, labels, sample_weight, counts)
        losses = get_chunk_losses(self.network, current_chunk(), self.placement)
        added = self._step.layer_sums(changes, inputs, counts, {})
        added["added"] = self._step.added_loss(losses, inputs, counts)
        return (self._step.metric_outputs(outputs), sums), self.devices.replicate(added)

    def predict(self, inputs):
        """See `Engine.predict`."""
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        self._consistency.check(inputs, "predict")
        rows = num_rows(inputs)
        outputs, _ = self._predict(self.devices.put_sharded(inputs))
        return tf.nest.map_structure(lambda x: x[:rows], from_last(outputs, "outputs"))

    def example_outputs(self):
        """See `Engine.example_outputs`."""
        return zeros_like(self._example.outputs)

    # Reports on a step.

    @contextlib.contextmanager
    def recording(self, part):
        """Record the graphs of a part of the step that are compiled in the `with` block."""
        graphs = {}
        with transport.recording_graphs(graphs):
            yield
        if graphs:
            self._graphs[part] = list(graphs)

    @property
    def num_stored_passes(self):
        """Maximum number of stored activations of chunks, divided by this stage's chunks."""
        return max_stored_micro_batches(self._instructions[self.stage]) / len(local_chunks())

    def collectives(self):
        """Return the `Collective`s of a step: on the mesh, between ranks and between stages."""
        on_mesh = [
            dataclasses.replace(collective, layer=function.layer_name(collective.layer))
            for function, names in self._compiled
            for collective in audit.mesh_collectives(names, function.compilation.calls)
        ]
        graphs = itertools.chain(*self._graphs.values())
        between_ranks = [x for graph in graphs for x in audit.rank_collectives(graph)]
        shared = [
            audit.Collective("all-reduce", "all-reduce", shape, dtype, "ranks", size, path, False)
            for path, size, shape, dtype in self._shared.summed
        ]
        return self._num_micro_batches * (on_mesh + between_ranks) + shared + self.transfers()

    def transfers(self):
        """Return the `Collective`s that this stage sent to other stages in the last step."""
        sent = []
        dataflow = self._last_dataflow
        for instruction in self._instructions[self.stage]:
            if instruction.kind not in SENDS:
                continue
            backward = instruction.kind == SEND_GRADIENTS
            border_tensors = dataflow.gradients_after if backward else dataflow.sent_after
            for tensor in border_tensors(instruction.chunk - backward):
                layer = tensor.name.split(":")[0].split("/", 1)[-1]
                sent += [
                    audit.Collective(
                        "send/recv", "send/recv", tuple(shape), dtype, "stages", 2, layer, backward
                    )
                    for shape, dtype in self.devices.shard_specs([tensor])
                ]
        return sent

    def timeline(self, path=None):
        """Return the timeline of all stages in the last step; see `Trainer.timeline`."""
        if takes_gpu_branch() and not self.devices.measures:
            self.devices.measures = True
            raise ValueError(
                "On GPUs the times of a stage are measured only after the first call of "
                "timeline(). Train one more step and call timeline() again. From now on each step "
                "waits for the GPU."
            )
        timeline = gather_timeline(*self._last_events)
        if path is not None and job.is_chief():
            write(timeline, ideal_timeline(timeline, self._instructions), path)
        return timeline
