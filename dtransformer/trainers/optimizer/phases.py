"""Phases of an optimizer step, in the order in which gradients pass through them.

A phase is a function that changes a `StepData`. `ShardedOptimizer` lists the phases of a layout
once and binds their first arguments. The reduction over the data-parallel group is in
`reduce.py`, and the all-gather of new values in `store.py`.
"""

import dataclasses

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job


@dataclasses.dataclass
class StepData:
    """Tensors of one optimizer step.

    Args:
        gradients: List of tensors, one per `PlannedShard`. After `select_units`, one per
            `UpdateUnit`.
        values: List of tensors, one per `ParameterProxy`: current values from `select_units`,
            new values from `update_weights`.
        square_norms: Float32 tensor [num_shards]. Squared norm of each gradient. After
            `sum_square_norms`, of the weight shard's gradient over all ranks.
        norm: Float32 scalar. Norm of all gradients of the network before clipping.
    """

    gradients: list
    values: list | tuple = ()
    square_norms: tf.Tensor | None = None
    norm: tf.Tensor | None = None


def reduce_gradients(reduction, data):
    """Sum gradients over the data-parallel group; see `Reduction`."""
    data.gradients = reduction(data.gradients)


def unscale(loss_scale, data):
    """Divide gradients by the loss scale. Squares of scaled gradients could overflow float32."""
    data.gradients = loss_scale.unscale(data.gradients)


def measure_gradients(shards, data):
    """Compute the squared norm of each local gradient on the device of its shard."""
    squares = []
    for gradient, shard in zip(data.gradients, shards):
        with tf.device(shard.shard.value.device):
            squares.append(square_norm(gradient))
    data.square_norms = tf.stack(squares) if squares else tf.zeros([0])


def square_norm(gradient):
    """Return the squared Euclidean norm of a tensor, a float32 scalar."""
    return 2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32"))


def sum_square_norms(shards, data):
    """Sum squared norms over the ranks that store other shards of the same gradient."""
    squares = data.square_norms
    sharded = [i for i, shard in enumerate(shards) if shard.division is not None]
    squares = _all_reduce(squares, sharded, job.data_parallel_group(), "square_norms_of_shards")
    fractions = [shard.mesh_fraction for shard in shards]
    on_mesh = [i for i, fraction in enumerate(fractions) if fraction is not None]
    if on_mesh:
        squares *= tf.constant([1.0 if x is None else x for x in fractions], "float32")
    data.square_norms = _all_reduce(squares, on_mesh, job.model_parallel_group(), "square_norms")


def _all_reduce(vector, positions, group, name):
    """Return a vector with its elements at some positions summed over a group."""
    if group.size == 1 or not positions:
        return vector
    sums = transport.all_reduce(tf.gather(vector, positions), "Sum", group, name)
    return tf.tensor_scatter_nd_update(vector, [[i] for i in positions], sums)


def measure_norm(shards, data):
    """Compute the norm of all gradients over all pipeline stages."""
    counted = [i for i, shard in enumerate(shards) if shard.counts_in_norm]
    total = tf.reduce_sum(tf.gather(data.square_norms, tf.constant(counted, "int32")))
    total = transport.all_reduce(total, "Sum", job.pipeline_group(), "sum_of_stages")
    data.norm = tf.sqrt(total)


def clip(optimizer, shards, data):
    """Clip gradients by the optimizer's `clipvalue`, `clipnorm` or `global_clipnorm`.

    `clipnorm` uses the norm of a weight's full gradient.
    """
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        data.gradients = [tf.clip_by_value(x, -limit, limit) for x in data.gradients]
        return
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit or not shards:
        return
    if optimizer.clipnorm:
        weights = [shard.weight_index for shard in shards]
        squares = tf.math.unsorted_segment_sum(data.square_norms, weights, max(weights) + 1)
        norms = tf.gather(tf.sqrt(squares), weights)
        factors = tf.unstack(limit / tf.maximum(norms, limit))
    else:
        factors = [limit / tf.maximum(data.norm, limit)] * len(shards)
    data.gradients = [x * tf.cast(factor, x.dtype) for x, factor in zip(data.gradients, factors)]


def select_units(units, data):
    """Replace the shards' gradients by gradients of the local update units."""
    data.values = units.proxy_values()
    data.gradients = units.gradients(data.gradients)


# Keras would scale and clip again. With `gradient_accumulation_steps`, Keras clips the sum.
_SCALING = {"loss_scale_factor": None}
_CLIPPING = dict.fromkeys(("clipvalue", "clipnorm", "global_clipnorm"))


def update_weights(optimizer, update, data):
    """Update the local units; see `keras_update`."""
    settings = _SCALING if optimizer.gradient_accumulation_steps else _SCALING | _CLIPPING
    with _compat.meanwhile(optimizer, **settings):
        data.values = update(data.gradients, data.values)


def store_values(store, data):
    """Store the new values of `ParameterProxy`s and all-gather replicated weights; see `store`."""
    store(data.values)
