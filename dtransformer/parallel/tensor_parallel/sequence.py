"""Activations that are sharded along the sequence between products, and sums into them.

Under sequence parallelism the residual stream [b, s, h] is sharded along s over the model
axis: inputs of a product are all-gathered, and its partial sums are reduce-scattered
(Korthikanti et al., 2022, arXiv 2205.05198, §4.2). Otherwise the stream is laid out as inside of
products, replicated or sharded over the context axis, and the sums are all-reduced. This is for
tensors on the mesh.
"""

from collections.abc import Iterable

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import activation_specs, axis_size, constrain, relayout


def length_axis_of(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that shards the sequence of [b, s, ...] between products only, or None."""
    axis = activation_specs(("batch", "length"), shape[:2])[1]
    return None if axis == inner_length_axis_of(shape) else axis


def inner_length_axis_of(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that shards the sequence of [b, s, ...] in products, too, or None."""
    return activation_specs(("batch", "inner_length"), shape[:2])[1]


def all_gather_length(x: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """Let every device have the full sequence.

    The all-gather is an all-to-all that sends every device's shard to each. (DTensor's own
    is an all-reduce of the full tensor on CPUs, which sends twice as much.)

    Args:
        x: tensor [b, s, h].
        axis: the mesh axis.
        length_axis: the same, where s is sharded over it; None where it is not.

    Returns:
        [b, s, h] as it is where s is not; otherwise [t, b, s, h]: a copy for each of
        the t devices.
    """
    if length_axis is None:
        return constrain(x, ("batch", "inner_length", None))
    batch = activation_specs(("batch",), x.shape[:1])[0]
    x = relayout(x, (batch, length_axis, None))
    # [b, s, h] -> [t, b, s, h]
    copies = relayout(tf.stack([x] * axis_size(axis)), (None, batch, length_axis, None))
    return relayout(copies, (axis, batch, None, None))


def sum_partial(partial: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """Add up what each device has of a sum.

    An all-reduce; where the sequence is sharded a reduce-scatter, as an all-to-all of the
    summands and their local sum.

    Args:
        partial: tensor [t, b, s, h], a summand of each of the t devices.
        axis: the mesh axis.
        length_axis: the same, where s is to be sharded over it; None where it is not.

    Returns:
        A tensor [b, s, h].
    """
    batch, inner = activation_specs(("batch", "inner_length"), partial.shape[1:3])
    partial = relayout(partial, (axis, batch, inner, None))
    if length_axis is not None:
        partial = relayout(partial, (None, batch, length_axis, None))
    # [t, b, s, h] -> [b, s, h]
    return relayout(tf.reduce_sum(partial, axis=0), (batch, length_axis or inner, None))
