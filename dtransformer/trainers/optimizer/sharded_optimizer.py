"""Optimizer step of the current layout: selects the phases, and builds the optimizer for its shards."""

import contextlib
from functools import partial

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer import optimizer_step as phases
from dtransformer.trainers.optimizer import reduction
from dtransformer.trainers.optimizer.averages import assign_averages
from dtransformer.trainers.optimizer.buckets import buckets
from dtransformer.trainers.optimizer.checks import check_update
from dtransformer.trainers.optimizer.gradient_norms import group_by_layer
from dtransformer.trainers.optimizer.guard import StepGuard
from dtransformer.trainers.optimizer.keras_update import keras_update
from dtransformer.trainers.optimizer.optimizer_step import LossScale, OptimizerStep
from dtransformer.trainers.optimizer.shard_plan import make_partition, shard_plan
from dtransformer.trainers.optimizer.stochastic_rounding import (
    StateRounding,
    rounds_updates,
    states_in_dtype,
)
from dtransformer.trainers.optimizer.store import store
from dtransformer.trainers.optimizer.update_units import UpdateUnits


class ShardedOptimizer(OptimizerStep):
    """Optimizer step of the current layout, whose phases are selected once.

    Weights are only known as variables and shards, never as layers.

    Args:
        optimizer: Keras optimizer. It is built for the local shards unless it is built already.
        weights: List of trainable Keras variables.
        bucket_ids: List with the reduction bucket of each weight, or `None`; see `buckets`.
        compiler: `StepCompiler`.
        copies: Weights that another pipeline stage also stores and counts in the global norm.
        guard: `SpikeGuard`, or `None`.
        get_names: Function that returns a dict from `id`s of weights to names that do not depend on
            the layout, for random bits. Defaults to the weights' paths.
        log_gradient_norms: Boolean. Whether to compute the gradient norm of each layer.

    Attributes:
        partition: `Partition` of the update over the data-parallel group.
        shards: List of `PlannedShard`s.
        units: List of local `UpdateUnit`s, in the order of the optimizer's states.
        rounding: `StateRounding` of bfloat16 states and weights, or `None`.
        is_sharded: Boolean. Whether the data-parallel group shards the update of any weight.
        reduce_micro_batch: The `Reduction` of each micro-batch's gradients with
            `gradient_accumulation_shard`. `None` to accumulate the gradients themselves.
        stores_sums: Boolean. Whether ranks store reduced gradients until the update.

    Raises:
        ValueError: If the layout shards weights and the optimizer cannot update shards.
    """

    def __init__(
        self,
        optimizer,
        weights,
        bucket_ids,
        compiler,
        copies=(),
        guard=None,
        get_names=dict,
        log_gradient_norms=False,
    ):
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self.partition = make_partition(weights)
        self.shards = shard_plan(weights, self.partition, copies)
        paths = [shard.weight.path for shard in self.shards]
        self._layers = group_by_layer(paths) if log_gradient_norms else ([], [])
        self._units = UpdateUnits(self.shards, self.partition.kind)
        self.units = self._units.units
        self.is_sharded = any(shard.division is not None for shard in self.shards)
        self._on_mesh = any(shard.mesh_fraction is not None for shard in self.shards)
        config = get_parallel_config()
        self.rounding = None
        self._state_dtype = config.optimizer_state_dtype
        if self._state_dtype == "bfloat16" or any(map(rounds_updates, weights)):
            self.rounding = StateRounding(self.units, get_names())
        self._build(optimizer, weights)
        ids = [bucket_ids[shard.weight_index] for shard in self.shards]
        positions = buckets(ids, config.gradient_aggregation_group)
        accumulates = config.micro_batch_num > 1
        self.reduce_micro_batch = None
        if accumulates and config.gradient_accumulation_shard:
            self.reduce_micro_batch = reduction.Reduction(self.shards, positions)
        self.stores_sums = self.partition.level >= 2 and (
            self.reduce_micro_batch is not None or not accumulates
        )
        loss_scale = LossScale(optimizer)
        needs_store = self._units.proxies or any(x.replicated is not None for x in self.shards)
        self._store_values = partial(store, self._units, positions)
        super().__init__(
            phases=[*self._reduction_phases(positions), *self._norm_phases(loss_scale)],
            clip_factor=partial(phases.global_clip_factor, self._optimizer),
            update=keras_update(
                self._optimizer,
                self.units,
                compiler.run_eagerly,
                compiler.jit_update(weights),
                self.rounding,
            ),
            store=self._store_values if needs_store else None,
            loss_scale=loss_scale,
            guard=None if guard is None else StepGuard(guard, loss_scale.is_used),
            communication=transport.global_names if job.size() > 1 else contextlib.nullcontext,
        )

    def _build(self, optimizer, weights):
        """Check the optimizer and build it for the local units."""
        in_pipeline = job.pipeline_group().size > 1
        is_divided = self.is_sharded or self._on_mesh or bool(self._units.proxies) or in_pipeline
        parameters = [unit.parameter for unit in self.units]
        check_update(self._optimizer, weights, parameters, self.is_sharded, is_divided)
        if self._optimizer.use_ema and any(map(rounds_updates, weights)):
            raise ValueError(
                f"{type(self._optimizer).__name__} has `use_ema=True`, but averages of bfloat16 "
                "adapters would lose small changes. Use adapters with `dtype='float32'`."
            )
        if not optimizer.built:
            parts = [(unit.weight, unit.parameter) for unit in self.units]
            _compat.exclude_parts_from_weight_decay(self._optimizer, parts)
            creating_states = contextlib.nullcontext()
            if self.rounding:
                creating_states = states_in_dtype(self._optimizer, self._state_dtype)
            with creating_states:
                optimizer.build(parameters)
        elif self._state_dtype == "bfloat16" and all(
            v.dtype != "bfloat16" for v in optimizer.variables
        ):
            raise ValueError(
                f"{type(self._optimizer).__name__} was built before compile, without the bfloat16 "
                "states of optimizer_state_dtype. Pass an optimizer that is not built."
            )

    def _reduction_phases(self, positions):
        """Return the phases from an engine's gradients to sums over the data-parallel group."""
        if self.reduce_micro_batch is not None:
            # Micro-batches accumulate shards. Their sum is reduced already.
            return [phases.record_bytes]
        prepare = partial(phases.prepare_gradients, self.shards)
        if job.data_parallel_group().size == 1:
            return [prepare]
        reduce = partial(reduction.reduce_gradients, reduction.Reduction(self.shards, positions))
        return [reduce, phases.record_bytes] if self.stores_sums else [prepare, reduce]

    def _norm_phases(self, loss_scale):
        """Return the phases from reduced gradients to clipped gradients of update units."""
        selected = [
            loss_scale.unscale,
            partial(phases.measure_gradients, self.shards),
        ]
        if self.is_sharded or self._on_mesh:
            selected.append(partial(reduction.sum_square_norms, self.shards))
        has_stages = job.pipeline_group().size > 1
        sum_over_stages = reduction.sum_over_stages if has_stages else None
        selected.append(partial(phases.measure_norm, self.shards, sum_over_stages, self._layers))
        if not self._optimizer.gradient_accumulation_steps:
            selected.append(partial(phases.clip, self._optimizer, self.shards))
        if self.is_sharded or self._units.proxies:
            selected.append(partial(reduction.select_units, self._units))
        return selected

    def take_averages(self, exchanges=False):
        """Assign moving averages (`use_ema`) to the weights; see `assign_averages`."""
        with transport.global_names():
            assign_averages(self._optimizer, self._units, self._store_values, exchanges)

    @contextlib.contextmanager
    def averaged_weights(self):
        """Swap the weights with their moving averages in the `with` block."""
        self.take_averages(exchanges=True)
        try:
            yield
        finally:
            self.take_averages(exchanges=True)
