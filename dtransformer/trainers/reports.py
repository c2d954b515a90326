"""Reports on a trainer's layout: plan, communication, memory, experts and timeline."""

import tensorflow as tf

from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.keras_layers.shard import layouts_on_mesh
from dtransformer.parallel.mesh import axis_rules
from dtransformer.parallel.pipeline_parallel.stage_assignment import get_stage_layer_names
from dtransformer.parallel.runtime import job
from dtransformer.reports.communication import communication_report
from dtransformer.reports.memory import memory_report
from dtransformer.reports.plan import WeightPlan
from dtransformer.trainers.optimizer.shard_plan import make_partition


class Reports:
    """Reports of a trainer; see the methods of `Trainer` with the same names.

    Args:
        network: The `keras.Model` that is trained.
        optimizer: The Keras optimizer, or `None` before `compile`.
        program: The `Program`.
    """

    def __init__(self, network, optimizer, program):
        self._network = network
        self._optimizer = optimizer
        self._program = program

    def summary(self, **kwargs):
        if not job.is_chief():
            return
        self._network.summary(**kwargs)
        layouts = layouts_on_mesh(self._network) if self._network.built else []
        plan = WeightPlan.from_variables(self._network.variables, layouts=layouts)
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f" Ranks: {job.size()} ({job.topology()}); each device holds "
            f"{plan.elements_per_device:,} parameters ({plan.bytes_per_device / 2**20:.2f} MiB)"
        )

    def plan(self):
        network = self._network
        if not network.built:
            raise ValueError(
                "The network has no weights yet. Build it, or call it on a batch, before `plan`."
            )
        check_rules(network)
        shard = make_partition(network.trainable_variables)
        has_stages = job.placement().num_stages > 1 and self._program.engine is not None
        stages = get_stage_layer_names(network, job.placement()) if has_stages else ()
        shard = shard if shard.level else None
        return WeightPlan.from_variables(network.variables, shard, stages, layouts_on_mesh(network))

    def communication_report(self):
        graphs = list(self._program.compiler.graphs.values())
        if self._program.runner is None or not graphs:
            raise ValueError(
                "No training step is compiled yet. Call `fit` or `train_on_batch` first."
            )
        engine = self._program.engine
        return communication_report(
            self._network, engine.collectives(), engine.input_shapes, graphs
        )

    def memory_report(self, inputs=None):
        traced_bytes = self._program.compiler.traced_bytes
        if "gradients" not in traced_bytes:
            raise ValueError("No training step has run yet. Call `fit` or `train_on_batch` first.")
        engine = self._program.engine
        shapes = engine.input_shapes
        num_stored_passes = engine.num_stored_passes
        if inputs is not None:
            shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
            num_stored_passes /= get_parallel_config().micro_batch_num
        return memory_report(
            self._network,
            self._program.teacher,
            self._optimizer,
            self._program.optimizer_step,
            shapes,
            num_stored_passes,
            traced_bytes,
        )

    def expert_load(self):
        runner = self._program.runner
        report = None if runner is None else runner.step.expert_loads.report()
        if report is None or not report.layers:
            raise ValueError(
                "There is no expert load. Train a network with a `moe_config` of several experts "
                "for at least one step."
            )
        return report

    def timeline(self, path=None):
        if job.stage()[1] == 1 or self._program.engine is None:
            raise ValueError(
                "No step of a pipeline has run yet. Train with `pipeline_stage=2` or more first."
            )
        return self._program.engine.timeline(path)


def check_rules(network):
    """Check the configured axis rules against the weights of all stages.

    Raises:
        ValueError: If `expert_parallel` is set for a network without experts, or if a rule matches
            no weight (see `axis_rules.check_rules`).
    """
    config = get_parallel_config()
    if not config.parallel_rules and config.expert_parallel == 1:
        return
    axes = axis_rules.get_logical_axes(network.variables)
    if job.stage()[1] > 1:
        local_axes = sorted(filter(None, axes))
        axes = set().union(*all_gather_json(local_axes, "axes"))
    axis_rules.check_rules(axes)
    if config.expert_parallel > 1 and "expert" not in axes:
        raise ValueError(
            f"`expert_parallel={config.expert_parallel}` needs a network with experts, and this one "
            "has none. Give it a `moe_config` with several experts, or set `expert_parallel` to 1."
        )
