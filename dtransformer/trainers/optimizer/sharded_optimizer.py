"""Optimizer step: reduce and clip gradients, update local shards, all-gather new weights."""

import contextlib
from functools import partial

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer import phases
from dtransformer.trainers.optimizer.averages import assign_averages
from dtransformer.trainers.optimizer.checks import check_update
from dtransformer.trainers.optimizer.gradient_norms import group_by_layer
from dtransformer.trainers.optimizer.guard import StepGuard
from dtransformer.trainers.optimizer.keras_update import keras_update
from dtransformer.trainers.optimizer.reduce import buckets
from dtransformer.trainers.optimizer.shard_plan import make_partition, shard_plan
from dtransformer.trainers.optimizer.stochastic_rounding import (
    StateRounding,
    states_in_bfloat16,
)
from dtransformer.trainers.optimizer.store import store
from dtransformer.trainers.optimizer.update_units import UpdateUnits


class ShardedOptimizer:
    """Optimizer step of a layout: a list of phases that is built once.

    `reduce_and_clip` runs the phases up to clipped local gradients, and `apply` runs the rest.
    Weights are only known as variables and shards, never as layers.

    Args:
        optimizer: Keras optimizer. It is built for the local shards unless it is built already.
        weights: List of trainable Keras variables.
        bucket_ids: List with the reduction bucket of each weight, or `None`; see `buckets`.
        compiler: `StepCompiler`.
        copies: Weights that another pipeline stage also stores and counts in the global norm.
        guard: `SpikeGuard`, or `None`.
        names: Dict from `id`s of weights to names that do not depend on the layout, for random bits.
            Defaults to the weights' paths.
        log_gradient_norms: Boolean. Whether to compute the gradient norm of each layer.

    Attributes:
        partition: `Partition` of the update over the data-parallel group.
        shards: List of `PlannedShard`s.
        units: List of local `UpdateUnit`s, in the order of the optimizer's states.
        loss_scale: `LossScale`.
        guard: `StepGuard`, or `None`.
        rounding: `StateRounding` of bfloat16 states, or `None`.
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
        names=None,
        log_gradient_norms=False,
    ):
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self.loss_scale = LossScale(optimizer)
        self.guard = None if guard is None else StepGuard(guard, self.loss_scale.is_used)
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
        if config.optimizer_state_dtype == "bfloat16":
            self.rounding = StateRounding(self.units, names or {})
        self._build(optimizer, weights)
        ids = [bucket_ids[shard.weight_index] for shard in self.shards]
        positions = buckets(ids, config.gradient_aggregation_group)
        accumulates = config.micro_batch_num > 1
        self._reduces_micro_batches = accumulates and config.gradient_accumulation_shard
        self.stores_sums = self.partition.level >= 2 and (
            self._reduces_micro_batches or not accumulates
        )
        self._has_several_ranks = job.size() > 1
        self._reduction = phases.Reduction(self.shards, positions, self.stores_sums)
        self._store = partial(store, self._units, positions)
        self._gradient_phases = self._list_gradient_phases()
        jit_compile = compiler.jit_update(weights)
        update = keras_update(
            self._optimizer, self.units, compiler.run_eagerly, jit_compile, self.rounding
        )
        self._update_phases = [partial(phases.update_weights, self._optimizer, update)]
        if self._units.proxies or any(shard.replicated is not None for shard in self.shards):
            self._update_phases.append(partial(phases.store_values, self._store))

    def _build(self, optimizer, weights):
        """Check the optimizer and build it for the local units."""
        in_pipeline = job.pipeline_group().size > 1
        is_divided = self.is_sharded or self._on_mesh or bool(self._units.proxies) or in_pipeline
        parameters = [unit.parameter for unit in self.units]
        check_update(self._optimizer, weights, parameters, self.is_sharded, is_divided)
        if not optimizer.built:
            parts = [(unit.weight, unit.parameter) for unit in self.units]
            _compat.exclude_parts_from_weight_decay(self._optimizer, parts)
            create_states = states_in_bfloat16 if self.rounding else contextlib.nullcontext
            with create_states(self._optimizer):
                optimizer.build(parameters)
        elif self.rounding and all(v.dtype != "bfloat16" for v in optimizer.variables):
            raise ValueError(
                f"{type(self._optimizer).__name__} was built before compile, without the bfloat16 "
                "states of optimizer_state_dtype. Pass an optimizer that is not built."
            )

    def _list_gradient_phases(self):
        """Return the phases from an engine's gradients to clipped gradients of update units."""
        stages = job.pipeline_group()
        steps = []
        if self._reduces_micro_batches:
            # Micro-batches accumulate shards. Their sum is reduced already.
            self.reduce_micro_batch = self._reduction
        else:
            self.reduce_micro_batch = None
            steps.append(partial(phases.reduce_gradients, self._reduction))
        steps.append(partial(phases.unscale, self.loss_scale))
        steps.append(partial(phases.measure_gradients, self.shards))
        if self.is_sharded or self._on_mesh:
            steps.append(partial(phases.sum_square_norms, self.shards))
        stages = stages if stages.size > 1 else None
        steps.append(partial(phases.measure_norm, self.shards, stages, self._layers))
        if not self._optimizer.gradient_accumulation_steps:
            steps.append(partial(phases.clip, self._optimizer, self.shards))
        if self.is_sharded or self._units.proxies:
            steps.append(partial(phases.select_units, self._units))
        return steps

    @property
    def gradient_bytes(self):
        """Bytes of the gradients of a step on this rank, or `None` before the first step."""
        return self._reduction.gradient_bytes

    def reduce_and_clip(self, gradients, factor=None):
        """Reduce, unscale and clip the gradients of a step. `apply` clips by `global_clipnorm`.

        Args:
            gradients: List of tensors, as an engine returns them.
            factor: Scalar to multiply gradients by. `None` means 1.

        Returns:
            A `(gradients, values, norm, layer_norms)` tuple: the gradients of the local update
            units, the current values of the units that `ParameterProxy`s represent, the norm of all
            gradients before clipping, a float32 scalar, and a dict with the norm of each layer.
        """
        if factor is not None:
            gradients = [gradient * factor for gradient in gradients]
        data = phases.StepData(gradients)
        self._run(self._gradient_phases, data)
        return data.gradients, data.values, data.norm, data.layer_norms

    def apply(self, gradients, values, norm):
        """Update the weights, unless the loss scale or the guard skips the step.

        The arguments are the first results of `reduce_and_clip`.
        """
        data = phases.StepData(gradients, values, norm=norm)
        # Weight decay reads no gradient. Without this dependency it would also run in a step that
        # fails because the data has ended.
        with tf.control_dependencies([norm]):
            update = partial(self._run, self._update_phases, data)
            if self.loss_scale.is_used:
                update = partial(self.loss_scale.run, norm, update)
            if self.guard is None:
                update()
            else:
                self.guard.run(norm, update)

    def _run(self, steps, data):
        names = contextlib.nullcontext()
        if self._has_several_ranks:
            names = transport.global_names()
        with names:
            for phase in steps:
                phase(data)

    def take_averages(self, exchanges=False):
        """Assign moving averages (`use_ema`) to the weights; see `assign_averages`."""
        with transport.global_names():
            assign_averages(self._optimizer, self._units, self._store, exchanges)

    @contextlib.contextmanager
    def averaged_weights(self):
        """Swap the weights with their moving averages in the `with` block."""
        self.take_averages(exchanges=True)
        try:
            yield
        finally:
            self.take_averages(exchanges=True)


class LossScale:
    """Loss scale of an optimizer. All ranks skip steps with an overflow on any rank.

    A `keras.optimizers.LossScaleOptimizer` has a dynamic scale. An overflow halves the scale, and
    `dynamic_growth_steps` finite steps in a row double it. Other optimizers have a constant scale,
    `loss_scale_factor` or 1, and never skip a step.

    Args:
        optimizer: Keras optimizer.

    Attributes:
        is_used: Boolean. Whether the scale is dynamic.
        skipped_steps: Int64 scalar variable. Number of skipped steps.
        skipped_in_a_row: Int64 scalar variable. Number of skipped steps since the last update.

    Reference:
        [Micikevicius et al., 2018, §3.2](https://arxiv.org/abs/1710.03740)
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.is_used = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.skipped_steps = tf.Variable(0, trainable=False, dtype="int64")
        self.skipped_in_a_row = tf.Variable(0, trainable=False, dtype="int64")

    def value(self):
        """Return the scale, a float32 scalar."""
        return tf.identity(tf.convert_to_tensor(self._optimizer.scale_loss(1.0), "float32"))

    def unscale(self, gradients):
        """Return a list of gradients divided by the scale, if the optimizer has one."""
        if not self.is_used and self._optimizer.loss_scale_factor is None:
            return gradients
        scale = self.value()
        return [gradient / scale for gradient in gradients]

    def run(self, norm, update):
        """Call `update()` and adapt the scale. Skip the update if `norm` is not finite.

        Args:
            norm: Float scalar tensor. Global gradient norm, equal on all ranks.
            update: Function without arguments that changes the weights.
        """
        is_finite = tf.math.is_finite(norm)

        def update_weights():
            update()
            return is_finite

        tf.cond(is_finite, update_weights, lambda: is_finite)
        self._adapt(is_finite)

    def _adapt(self, is_finite):
        scale = self._optimizer.dynamic_scale.value
        finite_steps = self._optimizer.step_counter.value
        skipped = tf.cast(~is_finite, "int64")
        count = (1 - skipped) * (finite_steps + 1)
        grows = count >= self._optimizer.dynamic_growth_steps
        scale.assign(tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5) * scale)
        finite_steps.assign(tf.where(grows, tf.zeros_like(count), count))
        self.skipped_steps.assign_add(skipped)
        self.skipped_in_a_row.assign(skipped * (self.skipped_in_a_row + 1))
