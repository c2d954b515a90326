"""Means and variances of `BatchNormalization(synchronized=True)` over all data ranks.

Each rank computes the moments of its rows. One all-gather exchanges them, and its gradient is one
reduce-scatter. On a mesh, DTensor reduces over the devices, so nothing is exchanged here.
"""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace


def synchronize_batch_norms(network: keras.Model) -> None:
    """Let training steps compute the moments of synchronized layers over all data ranks.

    Calls outside of training steps keep the moments of the local rows.

    Args:
        network: `keras.Model`. Only its layers of type `keras.layers.BatchNormalization` with
            `synchronized=True` change.
    """
    for layer in _compat.flat_layers(network):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            _compat.replace_moments(layer, global_moments)


def global_moments(layer, local_moments, inputs, mask):
    """Return the mean and variance of a layer's inputs over all data ranks.

    The moments of ranks are combined with the numbers of their values:
    `mean = Σ nᵢ·meanᵢ / Σ nᵢ` and `variance = Σ nᵢ·(varianceᵢ + (meanᵢ - mean)²) / Σ nᵢ`. A rank
    without rows or with masked positions only has no influence.

    Args:
        layer: `keras.layers.BatchNormalization`.
        local_moments: Function `(inputs, mask)` that returns the local mean and variance, two
            float tensors `[c]`.
        inputs: Float tensor with `c` features in `layer.axis`.
        mask: Tensor in the shape of `inputs` without its last dimension, or `None`. Positions with
            a value of 0 do not count.

    Returns:
        A `(mean, variance)` tuple of tensors `[c]`, identical on all data ranks.
    """
    mean, variance = local_moments(inputs, mask)
    group = job.data_parallel_group()
    exchanges = trace.is_training_step() and not _compat.in_symbolic_scope()
    if group.size == 1 or trace.is_on_mesh() or not exchanges:
        return mean, variance
    local = tf.stack([_num_values(layer, inputs, mask), mean, variance])
    gathered = collectives.all_gather(local[None], group=group)
    counts, means, variances = tf.unstack(gathered, axis=1)
    fractions = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
    # The moments of a rank without rows are NaN.
    mean = tf.reduce_sum(tf.math.multiply_no_nan(means, fractions), 0)
    spread = variances + tf.square(means - mean)
    return mean, tf.reduce_sum(tf.math.multiply_no_nan(spread, fractions), 0)


def _num_values(layer, inputs, mask):
    """Return the number of values of each feature that are not masked, a float tensor [c]."""
    num_features = inputs.shape[layer.axis]
    if mask is None:
        count = tf.size(inputs) // num_features
        return tf.fill([num_features], tf.cast(count, inputs.dtype))
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    weights = tf.cast(tf.cast(mask, "bool"), inputs.dtype)[..., None]
    return tf.reduce_sum(tf.broadcast_to(weights, tf.shape(inputs)), axes)
