"""Optimizer step: reduce and clip gradients, update local shards, all-gather new weights."""

from functools import partial

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.trainers.optimizer import phases
from dtransformer.trainers.optimizer.averages import assign_averages
from dtransformer.trainers.optimizer.checks import check_update
from dtransformer.trainers.optimizer.keras_update import keras_update
from dtransformer.trainers.optimizer.loss_scale import LossScale
from dtransformer.trainers.optimizer.reduce import Reduction
from dtransformer.trainers.optimizer.shard_plan import partition_of, shard_plan
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

    Attributes:
        partition: `Partition` of the update over the data-parallel group.
        shards: List of `PlannedShard`s.
        units: List of local `UpdateUnit`s, in the order of the optimizer's states.
        loss_scale: `LossScale`.
        is_sharded: Boolean. Whether the data-parallel group shards the update of any weight.
        reduce_micro_batch: Function of the list of a micro-batch's gradients. Returns the tensors to
            accumulate: reduced shards with `gradient_accumulation_shard`, otherwise the gradients.

    Raises:
        ValueError: If the layout shards weights and the optimizer cannot update shards.
    """

    def __init__(self, optimizer, weights, bucket_ids, compiler, copies=()):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._optimizer = inner
        self.loss_scale = LossScale(optimizer)
        self.partition = partition_of(weights)
        self.shards = shard_plan(weights, self.partition, copies)
        self._units = UpdateUnits(self.shards, self.partition.kind)
        self.units = self._units.units
        self.is_sharded = any(shard.division is not None for shard in self.shards)
        on_mesh = any(shard.mesh_fraction is not None for shard in self.shards)
        selects_units = self.is_sharded or bool(self._units.proxies)
        is_divided = selects_units or on_mesh or job.pipeline_group().size > 1
        parameters = [unit.parameter for unit in self.units]
        check_update(inner, weights, parameters, self.is_sharded, is_divided)
        if not optimizer.built:
            parts = [(unit.weight, unit.parameter) for unit in self.units]
            _compat.exclude_parts_from_weight_decay(inner, parts)
            optimizer.build(parameters)
        self._reduction = Reduction(self.shards, bucket_ids, self.partition.level)
        self._store = partial(store, self._units, self._reduction.buckets)
        self._gradient_phases = self._list_gradient_phases(
            self.is_sharded or on_mesh, selects_units
        )
        jit_compile = compiler.jit_update(weights)
        update = keras_update(inner, self.units, compiler.run_eagerly, jit_compile)
        self._update_phases = [
            partial(phases.update_weights, inner, update),
            partial(phases.store_values, self._store),
        ]

    def _list_gradient_phases(self, sums_norms, selects_units):
        """Return the phases from an engine's gradients to clipped gradients of update units."""
        config = get_parallel_config()
        steps = []
        if config.gradient_accumulation_shard and config.micro_batch_num > 1:
            # Micro-batches accumulate shards. Their sum is reduced already.
            self.reduce_micro_batch = self._reduction
        else:
            self.reduce_micro_batch = _keep
            steps.append(partial(phases.reduce_gradients, self._reduction))
        steps.append(partial(phases.unscale, self.loss_scale))
        steps.append(partial(phases.measure_gradients, self.shards))
        if sums_norms:
            steps.append(partial(phases.sum_square_norms, self.shards))
        steps.append(partial(phases.measure_norm, self.shards))
        if not self._optimizer.gradient_accumulation_steps:
            steps.append(partial(phases.clip, self._optimizer, self.shards))
        if selects_units:
            steps.append(partial(phases.select_units, self._units))
        return steps

    @property
    def gradient_bytes(self):
        """Bytes of the gradients of a step on this rank, or `None` before the first step."""
        return self._reduction.gradient_bytes

    def reduce_and_clip(self, gradients, factor=None):
        """Reduce, unscale and clip the gradients of a step.

        Args:
            gradients: List of tensors, as an engine returns them.
            factor: Scalar to multiply gradients by. `None` means 1.

        Returns:
            A `(gradients, values, norm)` tuple: the gradients of the local update units, the
            current values of the units that `ParameterProxy`s represent, and the norm of all
            gradients before clipping, a float32 scalar.
        """
        if factor is not None:
            gradients = [gradient * factor for gradient in gradients]
        data = phases.StepData(gradients)
        _run(self._gradient_phases, data)
        return data.gradients, data.values, data.norm

    def apply(self, gradients, values, norm):
        """Update the weights, unless the loss scale skips the step.

        The arguments are the results of `reduce_and_clip`.
        """
        data = phases.StepData(gradients, values)
        # Weight decay reads no gradient. Without this dependency it would also run in a step that
        # fails because the data has ended.
        with tf.control_dependencies([norm]):
            self.loss_scale.run(norm, partial(_run, self._update_phases, data))

    def take_averages(self, exchanges=False):
        """Assign moving averages (`use_ema`) to the weights; see `assign_averages`."""
        with trace.scope(names_are_global=True):
            assign_averages(self._optimizer, self._units, self._store, exchanges)


def _keep(gradients):
    return gradients


def _run(steps, data):
    with trace.scope(names_are_global=True):
        for phase in steps:
            phase(data)
