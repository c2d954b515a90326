"""Phases of an optimizer step, from an engine's gradients to new weights.

A phase is a function that changes a `StepData`. The phases are in their order of execution.
`ShardedOptimizer` lists the phases of a layout once and binds their first arguments.
"""

import dataclasses
import itertools
import math
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job

# Maximum number of elements of a gradient that is copied, so that one operation measures all gradients
# of its size.
_MAX_STACKED = 2**16


def with_zeros(weights, gradients, zeros):
    """Replace missing gradients by zeros. Warn once per data-parallel group.

    Args:
        weights: List of Keras variables.
        gradients: List of tensors. `None` for a weight that the loss does not depend on.
        zeros: Function of a weight's index that returns a gradient of zeros.

    Returns:
        A list of tensors.
    """
    unused = [w.path for w, gradient in zip(weights, gradients) if gradient is None]
    if unused and not job.data_shard()[0]:
        warnings.warn(
            f"The loss does not depend on the weights {', '.join(unused)}. Only weight decay "
            "changes them. Check that compile received a loss for each output.",
            stacklevel=2,
        )
    return [zeros(i) if gradient is None else gradient for i, gradient in enumerate(gradients)]


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
        layer_norms: Dict from layer names to float32 scalars. Empty if they are not requested.
    """

    gradients: list
    values: list | tuple = ()
    square_norms: tf.Tensor | None = None
    norm: tf.Tensor | None = None
    layer_norms: dict = dataclasses.field(default_factory=dict)


class Reduction:
    """Sum of gradients over the data-parallel group, one collective per bucket and dtype.

    The gradients of an engine are divided by the normalizer of the global batch. Their sum over the
    group is the gradient of the mean over the global batch.

    Args:
        shards: List of `PlannedShard`s.
        buckets: List of lists of positions in `shards`.
        stores_sums: Boolean. Whether ranks store the sums until the update. Otherwise they store
            the gradients as passed.

    Call arguments:
        gradients: List of tensors, one per planned shard, as an engine returns them. `None` for
            gradients that a later call reduces.

    Returns:
        List of tensors. Shards with a division over the group get their flat local shard of the
        sum (reduce-scatter), other shards the full sum. `None` for gradients that are `None`.
    """

    def __init__(self, shards, buckets, stores_sums):
        # Dict from positions in `shards` to bytes. `None` before the first call.
        self._stored_bytes = None if shards else {}
        self._shards = shards
        self._stores_sums = stores_sums
        self._group = job.data_parallel_group()
        dtype = get_parallel_config().gradient_dtype
        self._dtype = None if dtype == "float32" else dtype
        self._collectives = []  # (positions, name)
        if self._group.size > 1:
            for bucket in buckets:
                summed = [i for i in bucket if not shards[i].is_reduced]
                sharded = [i for i in summed if shards[i].division is not None]
                replicated = [i for i in summed if shards[i].division is None]
                self._collectives.append((sharded, "shards"))
                self._collectives.append((replicated, "gradients"))

    @property
    def gradient_bytes(self):
        """Bytes of gradients that this rank stores until the update. `None` before the first call."""
        return None if self._stored_bytes is None else sum(self._stored_bytes.values())

    def __call__(self, gradients):
        reduced = []
        for gradient, shard in zip(gradients, self._shards):
            if gradient is None:
                reduced.append(None)
                continue
            stored = shard.shard if shard.replicated is None else shard.replicated
            gradient.set_shape(stored.shape)  # Results of XLA functions have no static shape.
            if not shard.is_reduced:
                gradient = tf.cast(gradient, shard.shard.value.dtype)
            reduced.append(gradient)
        for positions, name in self._collectives:
            existing = [i for i in positions if reduced[i] is not None]
            if existing:
                self._sum(reduced, existing, f"{name}_{existing[0]}")
        stored = dict(enumerate(reduced if self._stores_sums else gradients))
        sizes = {i: math.prod(x.shape) * x.dtype.size for i, x in stored.items() if x is not None}
        self._stored_bytes = {**(self._stored_bytes or {}), **sizes}
        return reduced

    def reduce_weights(self, gradients):
        """Return the sums of some weights' gradients.

        Args:
            gradients: Dict from ids of weights to lists of their shards' gradients.

        Returns:
            A dict with the same keys.
        """
        remaining = {key: iter(shards) for key, shards in gradients.items()}
        keys = [id(shard.weight) for shard in self._shards]
        with transport.global_names():
            sums = self([next(remaining[key]) if key in remaining else None for key in keys])
        reduced = {key: [] for key in gradients}
        for key, total in zip(keys, sums):
            if key in gradients:
                reduced[key].append(total)
        return reduced

    def _sum(self, gradients, positions, name):
        """Replace gradients at some positions, all sharded or all replicated, by their sums."""

        def collective(tensors, divisions, dtype):
            arguments = (tensors, self._group, f"{name}_{dtype}", self._dtype)
            if divisions[0] is None:
                return flat_shards.all_reduce(*arguments)
            return flat_shards.reduce_scatter(*arguments, divisions)

        divisions = [self._shards[i].division for i in positions]
        sums = by_dtype(collective, [gradients[i] for i in positions], divisions)
        for i, total in zip(positions, sums):
            gradients[i] = total


def reduce_gradients(reduction, data):
    """Sum gradients over the data-parallel group; see `Reduction`."""
    data.gradients = reduction(data.gradients)


def unscale(loss_scale, data):
    """Divide gradients by the loss scale. Squares of scaled gradients could overflow float32."""
    data.gradients = loss_scale.unscale(data.gradients)


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


def measure_norm(shards, stages, layers, data):
    """Compute the norm of all gradients, and the norms of layers.

    Args:
        shards: List of `PlannedShard`s.
        stages: `Group` of the pipeline, or `None`. One all-reduce sums all squares.
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
    if stages is not None:
        sums = transport.all_reduce(sums, "Sum", stages, "sum_of_stages")
    data.norm, *norms = tf.unstack(tf.sqrt(sums))
    data.layer_norms = dict(zip(names, norms))


def clip(optimizer, shards, data):
    """Clip gradients by the optimizer's `clipvalue` or `clipnorm`.

    `clipnorm` uses the norm of a weight's full gradient. For `global_clipnorm`, see `update_weights`.
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


def select_units(units, data):
    """Replace the shards' gradients by gradients of the local update units."""
    data.values = units.proxy_values()
    data.gradients = units.gradients(data.gradients)


# Keras would scale and clip again. With `gradient_accumulation_steps`, Keras clips the sum.
_SCALING = {"loss_scale_factor": None}
_CLIPPING = dict.fromkeys(("clipvalue", "clipnorm", "global_clipnorm"))


def update_weights(optimizer, update, data):
    """Update the local units; see `keras_update`.

    `global_clipnorm` is a factor on the gradients in the functions of the update, so that XLA does not
    store scaled gradients.
    """
    settings = _SCALING
    factor = None
    if not optimizer.gradient_accumulation_steps:
        settings = _SCALING | _CLIPPING
        limit = optimizer.global_clipnorm
        if limit and not optimizer.clipvalue and not optimizer.clipnorm:
            factor = limit / tf.maximum(data.norm, limit)
    with _compat.patched(optimizer, **settings):
        data.values = update(data.gradients, data.values, factor)


def store_values(store, data):
    """Store the new values of `ParameterProxy`s and all-gather replicated weights; see `store`."""
    store(data.values)
