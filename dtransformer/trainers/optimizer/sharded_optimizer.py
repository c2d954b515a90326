"""The optimizer step: what happens once a step on the shards of the weights that this rank has.

It knows nothing of layers: gradients come in, weights have changed when it is done.
"""

import math

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer import reduce
from dtransformer.trainers.optimizer.apply import OptimizerUpdate
from dtransformer.trainers.optimizer.checks import check_update
from dtransformer.trainers.optimizer.gradients import clip_shards, square_norms
from dtransformer.trainers.optimizer.shard_plan import OptimizerParameters, partition_of, shard_plan


class ShardedOptimizer:
    """Reduces gradients and updates weights, under the current config.

    Args:
        optimizer: a Keras optimizer; it is built, if it is not yet.
        weights: list of the Keras variables that are trained.
        bucket_ids: for each weight the bucket that its gradient is reduced in, or None.
        compiler: the `StepCompiler`.
        copies: those of the weights that another pipeline stage has, too, and counts in the
            norm of all gradients.

    Attributes:
        partition: the `Partition`.
        shards: list of the `PlannedShard`s.
        units: list of the `OptimizerParameter`s, in the order of the optimizer's states.
        loss_scale: the `LossScale`.
        gradient_bytes: bytes of the gradients that this rank keeps until it has them all:
            full ones, and from level 2 on their shards; None before the first step.

    Raises:
        ValueError: the optimizer cannot update shards of weights, and has to.
    """

    def __init__(self, optimizer, weights, bucket_ids, compiler, copies=()):
        config = get_parallel_config()
        self.loss_scale = LossScale(optimizer)
        self.partition = partition_of(weights)
        self.shards = shard_plan(weights, self.partition, copies)
        # Of gradients as an engine gives them.
        given = (one.shard if one.replicated is None else one.replicated for one in self.shards)
        self._shapes = [value.shape for value in given]
        self._sent_dtype = None if config.gradient_dtype == "float32" else config.gradient_dtype
        self.gradient_bytes = None
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._group = job.data_parallel_group()
        self._update_units = OptimizerParameters(self.shards, self.partition.kind)
        self.units, parameters = self._update_units.units, self._update_units.parameters
        self._is_sharded = [one.division is not None for one in self.shards]
        self.is_sharded = any(self._is_sharded)
        # Gradients of micro-batches are added up as shards: each is reduced for itself.
        self._reduces_micro_batches = (
            config.gradient_accumulation_shard
            and config.micro_batch_num > 1
            and config.optimizer_shard >= 2
        )
        on_mesh = any(one.norm_share is not None for one in self.shards)
        has_held = any(unit.is_held for unit in self.units)
        self._has_stages = job.pipeline_group().size > 1
        is_divided = self.is_sharded or on_mesh or has_held or self._has_stages
        check_update(self._optimizer, weights, parameters, self.is_sharded, is_divided)
        if not optimizer.built:
            parts = [(unit.weight, part) for unit, part in zip(self.units, parameters)]
            _compat.exclude_parts_from_weight_decay(self._optimizer, parts)
            optimizer.build(parameters)
        self._clips = not self._optimizer.gradient_accumulation_steps  # else it clips their sum
        self._buckets = [
            [i for i in bucket if not self.shards[i].comes_reduced]
            for bucket in reduce.buckets(
                [bucket_ids[one.number] for one in self.shards], config.gradient_aggregation_group
            )
        ]
        self._devices = [one.shard.value.device for one in self.shards]
        devices = [self._devices[unit.positions[0]] for unit in self.units]
        self._update = OptimizerUpdate(
            *(self._optimizer, parameters, devices),
            *(compiler.run_eagerly, compiler.jit_update(weights)),
            groups=[getattr(unit.weight, "update_group", None) for unit in self.units],
        )
        is_replicated = any(one.replicated is not None for one in self.shards)
        # Which parts of a step there are: on one device none of them.
        self._adds_up = self._group.size > 1
        self._divides = self.is_sharded or has_held
        self._adds_up_norms = self.is_sharded or on_mesh
        self._stores = is_replicated or has_held

    def reduce_micro_batch(self, gradients):
        """Return the gradients of a micro-batch as they are added up."""
        return self._reduce(gradients) if self._reduces_micro_batches else gradients

    def reduce_and_clip(self, gradients, factor=None):
        """Reduce the gradients of all micro-batches, and make them those of the units.

        Args:
            gradients: list of tensors, as an engine returns them.
            factor: scalar that they are multiplied with, or None.

        Returns:
            The gradients of the units, a list of tensors; the values of those units that are
            held for the update alone, a list of tensors; and the norm of all gradients, a float32
            scalar.
        """
        if factor is not None:
            gradients = [gradient * factor for gradient in gradients]
        with transport.global_names():
            if not self._reduces_micro_batches:
                gradients = self._reduce(gradients)
            gradients, norm = self._unscaled(gradients)
            if not self._divides:
                return gradients, [], norm
            held = self._update_units.held_values()
            return self._update_units.gradients(gradients), held, norm

    def apply(self, gradients, held, norm):
        """Update the weights with what `reduce_and_clip` returned."""
        # Weight decay needs no gradient: at the end of the data, where the step fails for want
        # of a batch, it would go on without one.
        with tf.control_dependencies([norm]):
            self.loss_scale.run(norm, lambda: self._update_and_store(gradients, held))

    def take_averages(self, exchanges=False):
        """Give the weights the values of their moving averages, with `use_ema`; all ranks call.

        Before the first step there are none.

        Args:
            exchanges: whether the averages get the weights' values: twice it changes nothing.
        """
        averages = _compat.averages_of(self._optimizer)
        if not averages or not int(self._optimizer.iterations):
            return
        with transport.global_names():
            held = iter(self._update_units.held_values())
        new = []
        for unit, average in zip(self.units, averages, strict=True):
            value = next(held) if unit.is_held else tf.identity(unit.parameter.value)
            taken = tf.identity(average.value)
            if unit.is_held:
                new.append(taken)
            else:
                unit.parameter.assign(taken)
            if exchanges:
                average.assign(tf.reshape(value, average.shape))
        if self._stores:
            self._store_new_values(new)

    def _reduce(self, gradients):
        """Return the sums of the gradients over the data-parallel group: shards where planned."""
        shapes = self._shapes
        for gradient, shape in zip(gradients, shapes):
            gradient.set_shape(shape)  # XLA's results have none
        kept = gradients
        gradients = [
            gradient if one.comes_reduced else tf.cast(gradient, one.shard.value.dtype)
            for gradient, one in zip(gradients, self.shards)
        ]
        reduced = gradients
        if self._adds_up:
            divisions = [one.division for one in self.shards]
            reduced = reduce.reduce(gradients, self._buckets, divisions, self._sent_dtype)
        if self.partition.level >= 2:
            shapes, kept = [gradient.shape for gradient in reduced], reduced
        self.gradient_bytes = sum(
            math.prod(shape) * gradient.dtype.size for shape, gradient in zip(shapes, kept)
        )
        return reduced

    def _unscaled(self, gradients):
        """Return reduced gradients without the loss' scale and clipped, and the norm of all."""
        scale = self.loss_scale.value()
        if self.loss_scale.is_used:  # before squares of scaled ones are beyond float32
            gradients = [gradient / scale for gradient in gradients]
        squares = square_norms(gradients, self._devices)
        if self._adds_up_norms:
            norm_shares = [one.norm_share for one in self.shards]
            squares = reduce.full_square_norms(squares, self._is_sharded, norm_shares)
        counted = tf.constant([i for i, one in enumerate(self.shards) if one.counts], "int32")
        total = tf.reduce_sum(tf.gather(squares, counted))
        if self._has_stages:
            total = transport.all_reduce(total, "Sum", job.pipeline_group(), "sum_of_stages")
        norm = tf.sqrt(total)
        if not self.loss_scale.is_used:  # the optimizer divides by a factor of its own
            norm /= scale
        if self._clips:
            owners = [one.number for one in self.shards]
            gradients = clip_shards(self._optimizer, gradients, squares, owners, norm)
        return gradients, norm

    def _update_and_store(self, gradients, held):
        off = {"clipvalue": None, "clipnorm": None, "global_clipnorm": None} if self._clips else {}
        with _compat.meanwhile(self._optimizer, **off):  # `clip_shards` has clipped
            new = self._update(gradients, held)
        if self._stores:
            self._store_new_values(new)

    def _store_new_values(self, held):
        """Store the new values that the update did not leave where they belong."""
        with transport.global_names():
            new = self._update_units.new_values(held)
            for number, bucket in enumerate(self._buckets):
                positions = [i for i in bucket if self.shards[i].replicated is not None]
                self._all_gather(positions, new, f"weights_{number}")
            for unit in self.units:
                for i in unit.positions:
                    one = self.shards[i]
                    if one.replicated is None and unit.is_held:
                        one.shard.assign(tf.reshape(new[i], one.shard.shape))

    def _all_gather(self, positions, new, name):
        """Assign to variables what the ranks have parts of, those of one type together."""
        shards = [self.shards[i] for i in positions]
        full = by_dtype(
            lambda parts, shapes, divisions, dtype: flat_shards.all_gather(
                parts, shapes, self._group, f"{name}_{dtype}", divisions
            ),
            [tf.cast(new[i], self.shards[i].replicated.dtype) for i in positions],
            [one.replicated.shape for one in shards],
            [one.division for one in shards],
        )
        for one, value in zip(shards, full):
            one.replicated.assign(value)


class LossScale:
    """The scale of the loss in float16; steps that overflow on a rank are skipped by all.

    Reference: Micikevicius et al., 2018, "Mixed Precision Training", arXiv 1710.03740, §3.2.

    Args:
        optimizer: a Keras optimizer. A `keras.optimizers.LossScaleOptimizer` keeps the
            scale, and says how it starts and after how many good steps it grows; with any
            other one the scale is 1, and no step is skipped.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.is_used = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.skipped_steps = tf.Variable(0, trainable=False, dtype="int64")
        self.skipped_in_a_row = tf.Variable(0, trainable=False, dtype="int64")

    def value(self):
        """Return the scale, a float32 scalar."""
        return tf.identity(tf.convert_to_tensor(self._optimizer.scale_loss(1.0), "float32"))

    def run(self, norm, update):
        """Call `update()` and adapt the scale; skip the update if gradients are inf or nan.

        Args:
            norm: Norm of all gradients, equal on all ranks.
            update: Function without arguments that changes the weights.
        """
        if not self.is_used:
            update()
            return
        scale, good_steps = self._optimizer.dynamic_scale.value, self._optimizer.step_counter.value
        is_finite = tf.math.is_finite(norm)

        def updated():
            update()
            return is_finite

        tf.cond(is_finite, updated, lambda: is_finite)
        skipped = tf.cast(~is_finite, "int64")
        good = (1 - skipped) * (good_steps + 1)
        grows = good >= self._optimizer.dynamic_growth_steps
        scale.assign(tf.where(is_finite, tf.where(grows, 2.0, 1.0), 0.5) * scale)
        good_steps.assign(tf.where(grows, tf.zeros_like(good), good))
        self.skipped_steps.assign_add(skipped)
        self.skipped_in_a_row.assign(skipped * (self.skipped_in_a_row + 1))
