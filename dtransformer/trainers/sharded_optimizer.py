"""The optimizer step: what happens once a step on the shards of the weights that this rank has.

It knows nothing of layers: gradients come in, weights have changed when it is done.
"""

import contextlib
import math

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.packing import by_dtype
from dtransformer.parallel.config import get_parallel_config
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.buckets import buckets
from dtransformer.trainers.compiled_update import compiled_update, update_units
from dtransformer.trainers.loss_scale import LossScale
from dtransformer.trainers.optimizer_checks import (
    check_clipping,
    check_elementwise,
    check_shards,
    without_clipping,
)
from dtransformer.trainers.updated_shards import partition_of, updated_shards


class ShardedOptimizer:
    """Reduces gradients and updates weights, under the current config.

    Args:
        optimizer: a Keras optimizer; it is built, if it is not yet.
        weights: list of the Keras variables that are trained.
        bucket_ids: for each weight the bucket that its gradient is reduced in, or None.
        jit_compile: whether the update is compiled with XLA.
        copies: those of the weights that another pipeline stage has, too, and counts in the
            norm of all gradients.

    Attributes:
        partition: the `Partition`.
        shards: list of the `UpdatedShard`s.
        loss_scale: the `LossScale`.
        gradient_bytes: bytes of the gradients that this rank keeps until it has them all:
            full ones, and from level 2 on their shards; None before the first step.
        graph: the graph that the step was traced in last; None before.

    Raises:
        ValueError: the optimizer cannot update shards of weights, and has to.
    """

    def __init__(self, optimizer, weights, bucket_ids, jit_compile, copies=()):
        config = get_parallel_config()
        self.loss_scale = LossScale(optimizer)
        self.partition = partition_of(weights)
        self.shards = updated_shards(weights, self.partition, copies)
        self.gradient_bytes = self.graph = None
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._group = job.data_parallel_group()
        self._units = [one.unit for one in self.shards]
        self._flat = [i for i, one in enumerate(self.shards) if one.is_flat]
        self._is_sharded = [one.is_sharded for one in self.shards]
        # Gradients of micro-batches are added up as shards: each is reduced for itself.
        self._reduces_micro_batches = (
            config.gradient_accumulation_shard
            and config.micro_batch_num > 1
            and config.optimizer_shard >= 2
        )
        if self.is_sharded:
            check_elementwise(self._optimizer)
            check_shards(self._optimizer)
        if not optimizer.built:
            optimizer.build(self._units)
        on_mesh = any(one.norm_share is not None for one in self.shards)
        self._clips = self.is_sharded or on_mesh or job.stage()[1] > 1
        if self._clips:
            check_clipping(self._optimizer)
        self._buckets = [
            [i for i in bucket if not self.shards[i].comes_reduced]
            for bucket in buckets(
                [bucket_ids[one.number] for one in self.shards], config.gradient_aggregation_group
            )
        ]
        devices = [one.shard.value.device for one in self.shards]
        self._update = update_units(self._optimizer, self._units)
        if jit_compile:
            self._update = compiled_update(self._optimizer, self._units, devices)

    @property
    def is_sharded(self):
        """Whether the ranks of the data-parallel group update different parts of some weight."""
        return any(self._is_sharded)

    def reduce_micro_batch(self, gradients):
        """Return the gradients of a micro-batch as they are added up."""
        return self._reduce(gradients) if self._reduces_micro_batches else gradients

    def step(self, gradients, factor=None):
        """Reduce the gradients of all micro-batches, and update the weights.

        Args:
            gradients: list of tensors, as an engine returns them.
            factor: scalar that they are multiplied with, or None.

        Returns:
            The norm of all gradients, a float32 scalar.
        """
        if not tf.executing_eagerly():
            self.graph = tf.compat.v1.get_default_graph()
        if factor is not None:
            gradients = grads.scale(gradients, factor)
        if not self._reduces_micro_batches:
            gradients = self._reduce(gradients)
        return self._apply(gradients)

    def _reduce(self, gradients):
        """Return the sums of the gradients over the data-parallel group: shards where planned."""
        dtype = get_parallel_config().gradient_dtype
        dtype = None if dtype == "float32" else dtype
        shapes = [one.gradient_shape for one in self.shards]
        for gradient, shape in zip(gradients, shapes):
            if not isinstance(gradient, tf.IndexedSlices):
                gradient.set_shape(shape)  # XLA's results have none
        kept = gradients
        gradients = [
            gradient if one.comes_reduced else grads.cast(gradient, one.unit.dtype)
            for gradient, one in zip(gradients, self.shards)
        ]
        reduced = grads.reduce(gradients, self._buckets, self._is_sharded, dtype)
        if self.partition.level >= 2:
            shapes, kept = [gradient.shape for gradient in reduced], reduced
        self.gradient_bytes = sum(
            math.prod(shape) * gradient.dtype.size for shape, gradient in zip(shapes, kept)
        )
        return reduced

    def _apply(self, gradients):
        """Update the weights with reduced gradients; return the norm of all of them."""
        norm_shares = [one.norm_share for one in self.shards]
        squares = grads.square_norms(gradients, self._is_sharded, norm_shares)
        counted = [square for square, one in zip(squares, self.shards) if one.counts]
        norm = tf.sqrt(grads.sum_over_stages(tf.add_n([tf.zeros([]), *counted])))
        scale = self.loss_scale.value()
        norm /= scale
        if self.loss_scale.is_used:
            gradients = grads.scale(gradients, 1 / scale)
            squares = [square / scale**2 for square in squares]
        if self._clips:
            numbers = [one.number for one in self.shards]
            gradients = grads.clip_shards(self._optimizer, gradients, squares, numbers, norm)
        # Weight decay needs no gradient: at the end of the data, where the step fails for want
        # of a batch, it would go on without one.
        with tf.control_dependencies([norm]):
            self.loss_scale.run(norm, lambda: self._update_and_all_gather(gradients))
        return norm

    def _update_and_all_gather(self, gradients):
        old = [
            flat_shards.own_shard(tf.convert_to_tensor(self.shards[i].shard.value), self._group)
            for i in self._flat
        ]
        with without_clipping(self._optimizer) if self._clips else contextlib.nullcontext():
            new = dict(zip(self._flat, self._update(gradients, old)))
        for i, one in enumerate(self.shards):
            if one.replicated is not None and i not in new:  # the master weights have changed
                new[i] = tf.cast(one.unit.value, one.replicated.dtype)
        for number, bucket in enumerate(self._buckets):
            positions = [i for i in bucket if i in new]
            variables = [self.shards[i].replicated for i in positions]
            self._all_gather([new[i] for i in positions], variables, f"weights_{number}")

    def _all_gather(self, shards, variables, name):
        """Assign to variables what the ranks have flat shards of, those of one type together."""
        full = by_dtype(
            lambda shards, shapes, dtype: flat_shards.all_gather(
                shards, shapes, self._group, f"{name}_{dtype}"
            ),
            shards,
            [variable.shape for variable in variables],
        )
        for variable, value in zip(variables, full):
            variable.assign(value)
