"""Buckets: gradients that are reduced together."""

from dtransformer import _compat
from dtransformer.layers.block import TransformerBlock
from dtransformer.parallel.config import get_parallel_config


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
