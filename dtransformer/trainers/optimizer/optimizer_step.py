"""Optimizer step: phases from an engine's gradients to clipped gradients, then the update.

A phase is a function that changes a `StepData`. The phases are in their order of execution.
`ShardedOptimizer` lists the phases of a layout once and binds their first arguments. Phases with
communication are in `reduction.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import keras
import tensorflow as tf

from dtransformer.parallel.tracing import trace

# Maximum number of elements of a gradient that is copied, so that one operation measures all gradients
# of its size.
_MAX_STACKED = 2**16


@dataclasses.dataclass
class StepData:
    """Tensors of one optimizer step.

    Args:
        gradients: List of tensors, one per `PlannedShard`. After `select_units`, one per
            `UpdateUnit`.
        values: List of tensors, one per `ParameterProxy`: current values from `select_units`.
        square_norms: Float32 tensor [num_shards]. Squared norm of each gradient. After
            `sum_square_norms`, of the weight shard's gradient over all ranks.
        norm: Float32 scalar. Norm of all gradients of the network before clipping.
        layer_norms: Dict from layer names to float32 scalars. Empty if they are not requested.
    """

    gradients: list
    values: object = ()
    square_norms: tf.Tensor | None = None
    norm: tf.Tensor | None = None
    layer_norms: dict | None = None


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

    def unscale(self, data):
        """Divide gradients by the scale. Squares of scaled gradients could overflow float32.

        This is a phase.
        """
        if self.is_used or self._optimizer.loss_scale_factor is not None:
            scale = self.value()
            data.gradients = [gradient / scale for gradient in data.gradients]

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


@dataclasses.dataclass(eq=False)
class OptimizerStep:
    """Optimizer step of a layout.

    `reduce_and_clip` runs the phases up to clipped local gradients, and `apply` updates the weights.

    Args:
        phases: List of functions of a `StepData`.
        clip_factor: Function that returns the factor on gradients for the norm of all gradients; see
            `global_clip_factor`.
        update: Function of the gradients of units, of the values of `ParameterProxy`s and of a factor
            that returns the new values of the latter; see `keras_update`.
        store: Function that stores these values, or `None` if the update assigns all weights.
        loss_scale: `LossScale`.
        guard: `StepGuard`, or `None`.
        communication: Function that returns the context manager of all communication.
    """

    phases: list
    clip_factor: Callable
    update: Callable
    store: Callable | None
    loss_scale: LossScale
    guard: object
    communication: Callable

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
        data = StepData(scaled(gradients, factor))
        with self.communication():
            for phase in self.phases:
                phase(data)
        return data.gradients, data.values, data.norm, data.layer_norms

    def apply(self, gradients, values, norm):
        """Update the weights, unless the loss scale or the guard skips the step.

        The arguments are the first results of `reduce_and_clip`.
        """
        # Weight decay reads no gradient. Without this dependency it would also run in a step that
        # fails because the data has ended.
        with tf.control_dependencies([norm]):
            update = partial(self._update_weights, gradients, values, norm)
            if self.loss_scale.is_used:
                update = partial(self.loss_scale.run, norm, update)
            if self.guard is None:
                update()
            else:
                self.guard.run(norm, update)

    def _update_weights(self, gradients, values, norm):
        with self.communication():
            new_values = self.update(gradients, values, self.clip_factor(norm))
            if self.store is not None:
                self.store(new_values)


def scaled(gradients, factor):
    """Return gradients multiplied by a scalar. `None` means 1."""
    if factor is None:
        return gradients
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


# Phases.


def prepare_gradients(shards, data):
    """Give gradients the static shapes and the dtypes of their shards."""
    gradients = with_stored_types(shards, data.gradients)
    record_bytes(data)  # Before the cast.
    data.gradients = gradients


def with_stored_types(shards, gradients):
    """Return gradients with the static shapes and dtypes of their shards, and `None`s as they are.

    XLA functions return no static shapes. Gradients that are already reduced keep their dtypes.
    """
    results = []
    for gradient, shard in zip(gradients, shards):
        if gradient is not None:
            stored = shard.shard if shard.replicated is None else shard.replicated
            gradient.set_shape(stored.shape)
            if not shard.is_reduced:
                gradient = tf.cast(gradient, shard.shard.value.dtype)
        results.append(gradient)
    return results


def record_bytes(data):
    """Record the bytes of the gradients that a rank stores until the update."""
    sizes = [math.prod(x.shape) * x.dtype.size for x in data.gradients]
    trace.record_bytes("gradients", sum(sizes))


def measure_gradients(shards, data):
    """Compute the squared norm of each local gradient on the device of its shard."""
    devices = [shard.shard.value.device for shard in shards]
    data.square_norms = square_norms(data.gradients, devices)


def square_norms(tensors, devices):
    """Return the squared Euclidean norms of n tensors, a float32 tensor [n].

    Args:
        tensors: List of tensors.
        devices: List with the device that measures each tensor.
    """
    large = []
    halves = []
    by_shape = {}
    for i, (tensor, device) in enumerate(zip(tensors, devices)):
        if math.prod(tensor.shape) <= _MAX_STACKED:
            by_shape.setdefault((device, tuple(tensor.shape)), []).append(i)
            continue
        large.append(i)
        with tf.device(device):
            halves.append(tf.nn.l2_loss(tf.cast(tensor, "float32")))  # Half of the square.
    squares = [2.0 * tf.stack(halves) if halves else tf.zeros([0])]
    for (device, shape), positions in by_shape.items():
        with tf.device(device):
            stacked = tf.cast(tf.stack([tensors[i] for i in positions]), "float32")
            squares.append(tf.reduce_sum(tf.square(stacked), range(1, len(shape) + 1)))
    order = [*large, *itertools.chain(*by_shape.values())]
    ranks = sorted(range(len(order)), key=order.__getitem__)
    return tf.gather(tf.concat(squares, 0), tf.constant(ranks, "int32"))


def measure_norm(shards, sum_over_stages, layers, data):
    """Compute the norm of all gradients, and the norms of layers.

    Args:
        shards: List of `PlannedShard`s.
        sum_over_stages: Function that sums a vector over the pipeline, or `None`.
        layers: Result of `group_by_layer`. Without names no layer is measured.
        data: `StepData`.
    """
    counted = [i for i, shard in enumerate(shards) if shard.counts_in_norm]
    squares = tf.gather(data.square_norms, tf.constant(counted, "int32"))
    sums = [tf.reduce_sum(squares)]
    names, indices = layers
    if names:
        ids = tf.constant([indices[i] for i in counted], "int32")
        sums += tf.unstack(tf.math.unsorted_segment_sum(squares, ids, len(names)))
    sums = tf.stack(sums)
    if sum_over_stages is not None:
        sums = sum_over_stages(sums)
    data.norm, *norms = tf.unstack(tf.sqrt(sums))
    data.layer_norms = dict(zip(names, norms))


def clip(optimizer, shards, data):
    """Clip gradients by the optimizer's `clipvalue` or `clipnorm`.

    `clipnorm` uses the norm of a weight's full gradient. For `global_clipnorm`, see
    `global_clip_factor`.
    """
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        data.gradients = [tf.clip_by_value(x, -limit, limit) for x in data.gradients]
    elif optimizer.clipnorm and shards:
        limit = optimizer.clipnorm
        weights = [shard.weight_index for shard in shards]
        squares = tf.math.unsorted_segment_sum(data.square_norms, weights, max(weights) + 1)
        norms = tf.gather(tf.sqrt(squares), weights)
        factors = tf.unstack(limit / tf.maximum(norms, limit))
        pairs = zip(data.gradients, factors)
        data.gradients = [x * tf.cast(factor, x.dtype) for x, factor in pairs]


def global_clip_factor(optimizer, norm):
    """Return the factor on all gradients for the optimizer's `global_clipnorm`, or `None` for 1.

    The functions of the update multiply by it, so that XLA does not store scaled gradients.

    Args:
        optimizer: Keras optimizer.
        norm: Float32 scalar. Norm of all gradients.
    """
    limit = optimizer.global_clipnorm
    # Keras clips the sum of accumulated gradients, and reads `clipvalue` and `clipnorm` first.
    if optimizer.gradient_accumulation_steps or optimizer.clipvalue or optimizer.clipnorm:
        return None
    return limit / tf.maximum(norm, limit) if limit else None
