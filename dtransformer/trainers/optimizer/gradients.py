"""Gradients that this rank has: norms, and clipping."""

import warnings
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job


def with_zeros(weights: list, gradients: list, zeros: Callable) -> list:
    """Return gradients, where None is zeros: a warning names those weights.

    Args:
        weights: list of `keras.Variable`s.
        gradients: list with what there is of each; None where the loss does not depend on it.
        zeros: a function of the number of a weight that returns the same of zeros.
    """
    unused = [w.path for w, gradient in zip(weights, gradients) if gradient is None]
    if unused and not job.data_shard()[0]:
        warnings.warn(
            f"the loss does not depend on the weights {', '.join(unused)}: nothing but weight decay "
            "changes them; did you forget a loss in compile?",
            stacklevel=2,
        )
    return [zeros(i) if gradient is None else gradient for i, gradient in enumerate(gradients)]


def square_norms(gradients: list, devices: Sequence[str] | None = None) -> tf.Tensor:
    """Return the square of the Euclidean norm of each of what this rank has.

    Args:
        gradients: list of tensors.
        devices: for each of them the name of the device that has it; None where there is one.

    Returns:
        A float32 tensor [number of gradients].
    """
    squares = []
    for gradient, device in zip(gradients, devices or [None] * len(gradients)):
        with tf.device(device):
            squares.append(2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32")))
    return tf.stack(squares) if squares else tf.zeros([0])


def clip_shards(
    optimizer, gradients: list, squares: tf.Tensor, owners: list, norm: tf.Tensor
) -> list:
    """Clip shards of gradients as an optimizer asks, by the norms of the full gradients.

    Args:
        optimizer: a Keras optimizer, which updates `without_clipping`.
        gradients: list of tensors, scaled as the optimizer scales the loss.
        squares: of each gradient, that of the full weight's.
        owners: for each gradient the number of the weight that it belongs to.
        norm: of all gradients of the network, not scaled.

    Returns:
        A list of tensors.
    """
    loss_scale = optimizer.scale_loss(1.0)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer.clipvalue:
        bounds = [tf.cast(optimizer.clipvalue * loss_scale, g.dtype) for g in gradients]
        return [tf.clip_by_value(g, -bound, bound) for g, bound in zip(gradients, bounds)]
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit or not gradients:
        return gradients
    if optimizer.clipnorm:
        limit *= loss_scale
        norms = tf.sqrt(tf.math.unsorted_segment_sum(squares, owners, max(owners) + 1))
        factors = tf.unstack(limit / tf.maximum(norms, limit), num=max(owners) + 1)
    else:
        owners, factors = [0] * len(owners), [limit / tf.maximum(norm, limit)]
    return [
        gradient * tf.cast(factors[number], gradient.dtype)
        for gradient, number in zip(gradients, owners)
    ]


def without_clipping(optimizer):
    """Inside the `with` block a Keras optimizer clips no gradients: `clip_shards` did."""
    return _compat.meanwhile(optimizer, clipvalue=None, clipnorm=None, global_clipnorm=None)
