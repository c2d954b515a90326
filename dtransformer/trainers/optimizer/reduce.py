"""Gradients between the ranks: their buckets, their sums, and the sums of their squares.

Gradients come in as sums over this rank's share of the batch, already divided by what the
whole batch counts, so that their sum over the data-parallel group is the gradient of the
global mean.
"""

from collections.abc import Sequence

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.block import TransformerBlock
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.collectives.transport import by_dtype, never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job


def reduce_sum(scalars: dict, name: str) -> dict:
    """Return the sums of scalars over the data-parallel group, by one collective.

    Args:
        scalars: dict of tensors of one type, all scalars or not.
        name: name of the reduction, the same on every rank.
    """
    group = job.data_parallel_group()
    own = [never_constant(x) for x in scalars.values()]
    return dict(zip(scalars, transport.all_reduce_together(own, group, name)))


def reduce(
    gradients: list, buckets: list, divisions: Sequence[Division | None], dtype: str | None = None
) -> list:
    """Return the sums of the gradients over the data-parallel group, bucket by bucket.

    Args:
        gradients: list of tensors.
        buckets: list of lists of positions, from `buckets`.
        divisions: for each gradient its `Division` over the group, of which only this rank's shard
            of the sum is wanted; None where all of it is.
        dtype: name of the type in which gradients travel, by default their own.

    Returns:
        A list of tensors; shards are flat, as those of `collectives.flat_shards`.
    """
    group, reduced = job.data_parallel_group(), list(gradients)
    for number, bucket in enumerate(buckets):
        for name, is_sharded in (("shards", True), ("gradients", False)):
            positions = [i for i in bucket if (divisions[i] is not None) == is_sharded]
            own = [gradients[i] for i in positions], [divisions[i] for i in positions]
            for i, total in zip(positions, _reduce(group, *own, f"{name}_{number}", dtype)):
                reduced[i] = total
    return reduced


def _reduce(group, gradients, divisions, name, dtype):
    """Reduce gradients of a bucket, all of them sharded or none, those of one type together."""

    def add_up(tensors, divisions, kind):
        if divisions[0] is None:
            return flat_shards.all_reduce(tensors, group, f"{name}_{kind}", dtype)
        return flat_shards.reduce_scatter(tensors, group, f"{name}_{kind}", dtype, divisions)

    return by_dtype(add_up, gradients, divisions)


def full_square_norms(
    squares: tf.Tensor, is_sharded: Sequence[bool], shares: Sequence[float | None]
) -> tf.Tensor:
    """Return the square of each gradient's Euclidean norm, that of the full weight's.

    Args:
        squares: float32 tensor [number of gradients], of what this rank has.
        is_sharded: for each gradient whether it is a shard over the data-parallel group.
        shares: for each gradient 1 over the number of the mesh's ranks that have the same
            shard; None where every rank has the full gradient.
    """
    over_data = [i for i, sharded in enumerate(is_sharded) if sharded]
    squares = _sum_some(squares, over_data, job.data_parallel_group(), "square_norms_of_shards")
    on_mesh = [i for i, share in enumerate(shares) if share is not None]
    if on_mesh:
        squares *= tf.constant([1.0 if share is None else share for share in shares], "float32")
    return _sum_some(squares, on_mesh, job.model_parallel_group(), "square_norms")


def _sum_some(vector, positions, group, name):
    """Return a vector with the sums over a group at some positions, by one collective."""
    if group.size == 1 or not positions:
        return vector
    sums = transport.all_reduce(tf.gather(vector, positions), "Sum", group, name)
    return tf.tensor_scatter_nd_update(vector, [[i] for i in positions], sums)


def bucket_ids(network, weights):
    """Return for each weight the bucket that its gradient is reduced in, or None.

    Args:
        network: a `keras.Model`; its blocks ask for buckets by `set_comm_fusion`.
        weights: list of Keras variables of it.
    """
    blocks = [
        layer for layer in _compat.flat_layers(network) if isinstance(layer, TransformerBlock)
    ]
    ids = [block.comm_fusion for block in blocks]
    if get_parallel_config().optimizer_shard >= 2:
        # Each block for itself: as soon as its gradients are there, they are sharded.
        ids = [f"block {i}" if one is None else one for i, one in enumerate(ids)]
    bucket_of = {
        id(weight): one for block, one in zip(blocks, ids) for weight in block.trainable_variables
    }
    return [bucket_of.get(id(weight)) for weight in weights]


def buckets(ids, num_buckets):
    """Divide gradients into buckets.

    Args:
        ids: for each gradient the bucket that its block asks for, or None.
        num_buckets: number of buckets for the gradients that no block speaks for.

    Returns:
        A list of lists of positions, each in rising order. Gradients with the same id share a
        bucket; the others are spread evenly over `num_buckets` if no block speaks at all, and
        share one otherwise.

    Example:

    >>> buckets([None, 1, 1, 2, None], num_buckets=4)
    [[0, 4], [1, 2], [3]]
    >>> buckets([None] * 5, num_buckets=2)
    [[0, 1, 2], [3, 4]]
    """
    if all(one is None for one in ids):
        size = max(-(-len(ids) // num_buckets), 1)
        return [
            list(range(start, min(start + size, len(ids)))) for start in range(0, len(ids), size)
        ]
    found = {}
    for position, one in enumerate(ids):
        found.setdefault(one, []).append(position)
    return list(found.values())
