"""Methods of a trainer that report its layout: plan, communication, memory, timeline."""

import math
import warnings

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh import axis_rules
from dtransformer.parallel.mesh.variable import sharding_specs
from dtransformer.parallel.pipeline_parallel.stage_assignment import layers_of_stages
from dtransformer.parallel.pipeline_parallel.stage_weights import own_weights
from dtransformer.parallel.runtime import job
from dtransformer.reports.communication import communication_report
from dtransformer.reports.memory import memory_report
from dtransformer.reports.plan import WeightPlan
from dtransformer.trainers.optimizer.shard_plan import partition_of


class Reporting(keras.Model):
    """The methods of a trainer that tell how its work is divided, and what that costs.

    A subclass has the `network`, its `_engine`, `_step`, `_compiler` and `optimizer_step`, None before
    there are any.
    """

    _engine = _step = _compiler = optimizer_step = None

    def summary(self, **kwargs):
        """Print the network, and what a rank holds of it; as `keras.Model.summary`."""
        if not job.is_chief():
            return
        self.network.summary(**kwargs)
        plan = WeightPlan.of(self.network.variables)
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f" Ranks: {job.size()} ({job.topology()}); each device holds "
            f"{plan.elements_per_device:,} parameters ({plan.bytes_per_device / 2**20:.2f} MiB)"
        )

    def plan(self):
        """Return how every weight is sharded, and what a device holds.

        In a pipeline those of this rank's stage, and which layers each stage has, after the first
        batch.

        Returns:
            A `dtransformer.reports.plan.WeightPlan`, which prints as a table.

        Raises:
            ValueError: the network is not built, or a row of `parallel_rules` matches no
                weight.

        Example:

        >>> print(trainer.plan())
        weight                      shape  type     dimensions           sharded over  bytes per rank
        ...
        causal_lm/embedding/table   50×8   float32  (vocab_rows, embed)  (–, –)                 1,600
        ...
        20 weights with 9,480 elements. Each device stores 9,480 of them: ...
        """
        if not self.network.built:
            raise ValueError("the network has no weights yet: build it, or call it on a batch")
        check_rules(self.network)
        shard = partition_of(self.network.trainable_variables)
        placed = job.placement().num_stages > 1 and self._engine is not None
        stages = layers_of_stages(self.network, job.placement()) if placed else ()
        return WeightPlan.of(self.network.variables, shard if shard.level else None, stages)

    def communication_report(self):
        """Return which collectives the last compiled training step sends.

        Those of the mesh are read from the functions that DTensor lowered for the
        devices, those of data-parallel ranks from the step's graphs; what pipeline stages
        send each other is that of the dataflow.

        Returns:
            A `dtransformer.reports.communication.CommunicationReport`, which prints as a table.
            Where the network has the method `stream_shapes(inputs)`, the theory's numbers for
            each block stand beside.

        Raises:
            ValueError: no step was compiled yet.
        """
        if self._step is None or not self._compiler.graphs:
            raise ValueError("no training step is compiled yet: call fit or train_on_batch first")
        return communication_report(
            self.network,
            self._engine.collectives(),
            self._engine.input_shapes,
            list(self._compiler.graphs.values()),
        )

    def memory_report(self, inputs=None):
        """Return what this rank's memory is needed for.

        Args:
            inputs: a batch of inputs, as `call` takes them, for which the activations
                that blocks keep are worked out; on a mesh by default the last batch.

        Returns:
            A `dtransformer.reports.memory.MemoryReport`, which prints as a table: bytes of
            weights, gradients, optimizer states and activations, by the plan and the theory,
            next to those of the tensors that there are.

        Raises:
            ValueError: no step was run yet.

        Example:

        >>> print(trainer.memory_report(inputs))
        bytes of this rank   planned     measured
        --------------------------------------...
        weights               37,920       37,920
        gradients             37,920       37,920
        optimizer states      75,840       75,840
        activations           24,720            –
        all                  176,400            –
        peak of the process        –  ...
        """
        if self.optimizer_step is None or self.optimizer_step.gradient_bytes is None:
            raise ValueError("no training step was run yet: call fit or train_on_batch first")
        shapes, num_kept = self._engine.input_shapes, self._engine.num_kept
        if inputs is not None:
            shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
            num_kept /= get_parallel_config().micro_batch_num
        return memory_report(self.network, self.optimizer, self.optimizer_step, shapes, num_kept)

    def expert_load(self):
        """Return how the tokens of the last epoch's steps were spread over the experts.

        Those of all ranks and micro-batches, in a pipeline of all stages.

        Returns:
            A `dtransformer.reports.expert_load.ExpertLoad`, which prints as a table; its
            `write("load.png")` is a picture.

        Raises:
            ValueError: no step was run yet, or the network has no experts.
        """
        report = None if self._step is None else self._step.expert_loads.report()
        if report is None or not report.layers:
            raise ValueError(
                "there is no load of experts: train a network with a moe_config of several experts"
            )
        return report

    def timeline(self, path=None):
        """Return what the stages of the pipeline did in the last training step.

        All ranks have to call. Clocks of different hosts are taken as they are. On GPUs the first
        call lets the steps that follow be measured, which wait for the GPU then.

        Args:
            path: where rank 0 writes it, and the step if sends took no time: a .json file in the
                Trace Event Format, which Perfetto shows.

        Returns:
            A `dtransformer.parallel.schedules.timeline.Timeline`; its `bubble` is the share
            of the step in which the stages do not compute.

        Raises:
            ValueError: there is no pipeline, or no step was run yet, or none was measured.
        """
        if job.stage()[1] == 1 or self._engine is None:
            raise ValueError("no step of a pipeline was run: train with pipeline_stage=2 or more")
        return self._engine.timeline(path)


def check_rules(network):
    """Check the axis rules that the user asked for against all stages' weights.

    Raises:
        ValueError: no weight is of experts that are to be sharded; or see `axis_rules.check_rules`.
    """
    config = get_parallel_config()
    if config.parallel_rules or config.expert_parallel > 1:
        used = axis_rules.axes_of(network.variables)
        if job.stage()[1] > 1:  # each stage has some of the weights
            used = set().union(*all_gather_json(sorted(filter(None, used)), "axes"))
        axis_rules.check_rules(used)
        if config.expert_parallel > 1 and "expert" not in used:
            raise ValueError(
                f"expert_parallel={config.expert_parallel}, and the network has no experts: give it "
                "a moe_config of several, or set expert_parallel=1"
            )


def warn_of_replicated_layers(network):
    """Warn on rank 0 if `model_parallel` does not shard some layers, such as Keras' own.

    A layer has no sharding rule if its weights of two or more dimensions have no logical axes. The
    weights of all pipeline stages are counted.
    """
    degree, sharded, total, kinds = get_parallel_config().model_parallel, 0, 0, set()
    for layer in _compat.flat_layers(network):
        for variable in own_weights(layer):
            num_bytes = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
            total += num_bytes
            if "model" in sharding_specs(variable):
                sharded += num_bytes
            elif len(variable.shape) > 1 and not hasattr(variable, "logical_axes"):
                kinds.add(type(layer).__name__)
    if kinds and degree > 1 and job.is_chief():
        warnings.warn(
            f"model_parallel={degree} shards {sharded:,} of the {total:,} bytes of the weights and "
            f"replicates {total - sharded:,}: {', '.join(sorted(kinds))} have no sharding rule. "
            "Use layers of dtransformer.layers, or model_parallel=1 and more data ranks",
            stacklevel=2,
        )
