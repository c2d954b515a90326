"""Buckets of gradients: gradients of a bucket are reduced in one collective."""

from dtransformer import _compat
from dtransformer.layers.block import TransformerBlock
from dtransformer.parallel.config.config import get_parallel_config


def bucket_ids(network, weights):
    """Return the requested reduction bucket of each weight.

    A block's `set_comm_fusion` requests a bucket. From level 2 of optimizer sharding on, every
    other block has a separate bucket, so that its full gradients are freed early.

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
