"""Sums over the data-parallel group: gradients in buckets, and scalars.

An engine divides its gradients by the normalizer of the global batch. Their sum over the group is
the gradient of the mean over the global batch.
"""

import math

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.block import TransformerBlock
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.transport import by_dtype, never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job


def reduce_sum(scalars: dict, name: str) -> dict:
    """Sum tensors over the data-parallel group in one collective.

    Args:
        scalars: Dict of tensors of one dtype.
        name: String. Name of the collective, identical on all ranks.

    Returns:
        A dict with the same keys.
    """
    local = [never_constant(x) for x in scalars.values()]
    sums = transport.all_reduce_together(local, job.data_parallel_group(), name)
    return dict(zip(scalars, sums))


class Reduction:
    """Sum of gradients over the data-parallel group, one collective per bucket and dtype.

    Args:
        shards: List of `PlannedShard`s.
        bucket_ids: List with the bucket id of each weight, or `None`; see `buckets`.
        level: Integer. Level of optimizer sharding.

    Call arguments:
        gradients: List of tensors, one per planned shard, as an engine returns them.

    Returns:
        List of tensors. Shards with a division over the group get their flat local shard of the
        sum (reduce-scatter), other shards the full sum.

    Attributes:
        buckets: List of lists of positions in `shards`.
        gradient_bytes: Integer. Bytes of gradients that this rank stores until the update, or `None`
            before the first call. From level 2 on, this counts reduced shards.
    """

    def __init__(self, shards, bucket_ids, level):
        config = get_parallel_config()
        ids = [bucket_ids[shard.weight_index] for shard in shards]
        self.buckets = [
            [i for i in bucket if not shards[i].is_reduced]
            for bucket in buckets(ids, config.gradient_aggregation_group)
        ]
        self.gradient_bytes = None
        self._shards = shards
        self._level = level
        self._dtype = None if config.gradient_dtype == "float32" else config.gradient_dtype

    def __call__(self, gradients):
        reduced = []
        for gradient, shard in zip(gradients, self._shards):
            stored = shard.shard if shard.replicated is None else shard.replicated
            gradient.set_shape(stored.shape)  # Results of XLA functions have no static shape.
            if not shard.is_reduced:
                gradient = tf.cast(gradient, shard.shard.value.dtype)
            reduced.append(gradient)
        if job.data_parallel_group().size > 1:
            for index, bucket in enumerate(self.buckets):
                sharded = [i for i in bucket if self._shards[i].division is not None]
                replicated = [i for i in bucket if self._shards[i].division is None]
                self._sum(reduced, sharded, f"shards_{index}")
                self._sum(reduced, replicated, f"gradients_{index}")
        kept = reduced if self._level >= 2 else gradients
        self.gradient_bytes = sum(math.prod(x.shape) * x.dtype.size for x in kept)
        return reduced

    def _sum(self, gradients, positions, name):
        """Replace gradients at some positions, all sharded or all replicated, by their sums."""
        group = job.data_parallel_group()

        def collective(tensors, divisions, dtype):
            arguments = (tensors, group, f"{name}_{dtype}", self._dtype)
            if divisions[0] is None:
                return flat_shards.all_reduce(*arguments)
            return flat_shards.reduce_scatter(*arguments, divisions)

        divisions = [self._shards[i].division for i in positions]
        sums = by_dtype(collective, [gradients[i] for i in positions], divisions)
        for i, total in zip(positions, sums):
            gradients[i] = total


def bucket_ids(network, weights):
    """Return the requested reduction bucket of each weight.

    A block's `set_comm_fusion` requests a bucket. From level 2 of optimizer sharding on, every
    other block has a bucket of its own, so that its full gradients are freed early.

    Args:
        network: Keras model.
        weights: List of its Keras variables.

    Returns:
        A list of bucket ids, `None` for a weight without a request.
    """
    blocks = [x for x in _compat.flat_layers(network) if isinstance(x, TransformerBlock)]
    shards_gradients = get_parallel_config().optimizer_shard >= 2
    id_by_weight = {}
    for i, block in enumerate(blocks):
        bucket = block.comm_fusion
        if bucket is None and shards_gradients:
            bucket = f"block {i}"
        for weight in block.trainable_variables:
            id_by_weight[id(weight)] = bucket
    return [id_by_weight.get(id(weight)) for weight in weights]


def buckets(ids, num_buckets):
    """Divide gradients into buckets.

    Gradients with equal ids share a bucket, and so do all gradients without an id. If no gradient
    has an id, consecutive gradients are divided evenly into at most `num_buckets` buckets.

    Args:
        ids: List with the requested bucket of each gradient, or `None`.
        num_buckets: Integer. Maximum number of buckets if no gradient has an id.

    Returns:
        A list of lists of positions in rising order.

    Example:

    >>> buckets([None, 1, 1, 2, None], num_buckets=4)
    [[0, 4], [1, 2], [3]]
    >>> buckets([None] * 5, num_buckets=2)
    [[0, 1, 2], [3, 4]]
    """
    if all(bucket is None for bucket in ids):
        size = max(-(-len(ids) // num_buckets), 1)
        positions = list(range(len(ids)))
        return [positions[start : start + size] for start in range(0, len(ids), size)]
    by_id = {}
    for position, bucket in enumerate(ids):
        by_id.setdefault(bucket, []).append(position)
    return list(by_id.values())
