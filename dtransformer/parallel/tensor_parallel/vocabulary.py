"""A vocabulary that is sharded: its padded size, and looking ids up in its shards."""

import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import Specs, relayout
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE


def padded_vocab_size(vocab_size: int) -> int:
    """Return the size V' of a vocabulary's dimension: the next multiple of model_parallel.

    Example:

    >>> padded_vocab_size(10)
    10
    """
    model_parallel = get_parallel_config().model_parallel
    return -(-vocab_size // model_parallel) * model_parallel


def mask_padding(logits: tf.Tensor, vocab_size: int) -> tf.Tensor:
    """Give padded entries the type's lowest number: they never win, and have probability 0.

    Args:
        logits: tensor [..., V'].
        vocab_size: number V ≤ V' of true entries.

    Returns:
        A tensor [..., V'].
    """
    width = logits.shape[-1]
    if width == vocab_size:
        return logits
    is_entry = tf.range(width) < vocab_size
    return tf.where(is_entry, logits, tf.constant(logits.dtype.min, logits.dtype))


def look_up_in_shards(shards: tf.Tensor, ids: tf.Tensor, shard_dim: int, specs: Specs) -> tf.Tensor:
    """Look ids up in every shard of a vocabulary; zeros stand for what another shard has.

    On CPUs an id that no shard has is an error of the operation, as of `tf.gather`.

    The sum over the shards has them all (Shoeybi et al., 2019, arXiv 1909.08053, §3).

    Args:
        shards: tensor on the mesh: [t, V/t, h] of a table, with `shard_dim` 0; or
            [..., t, V/t] of values of each id, with `shard_dim` -2.
        ids: int tensor [...].
        shard_dim: the dimension of the shards, of which each device has its own.
        specs: the mesh axis, or None, that shards each dimension of [t, ...], or [..., t]:
            the ids of each shard.

    Returns:
        A tensor [t, ..., h], or [..., t].
    """
    dim = shard_dim % len(shards.shape)
    num_shards, shard_size = shards.shape[dim], shards.shape[dim + 1]
    of_each = [num_shards if d == dim else 1 for d in range(len(specs))]
    ids = tf.cast(ids, INDEX_TYPE)
    starts = tf.reshape(shard_size * tf.range(num_shards, dtype=INDEX_TYPE), of_each)
    starts = relayout(starts, [spec if d == dim else None for d, spec in enumerate(specs)])
    # The number of an id in its shard, and whether it is there.
    local = tf.reshape(ids, [*ids.shape[:dim], 1, *ids.shape[dim:]]) - starts
    local = relayout(local, specs)
    zero = tf.zeros([], INDEX_TYPE)
    is_here = (local >= 0) & (local < shard_size)
    is_elsewhere = (local >= -starts) & (local < num_shards * shard_size - starts)
    numbers = tf.where(is_here, local, tf.where(is_elsewhere, zero, zero - 1))
    found = tf.gather(shards, numbers, axis=dim + 1, batch_dims=dim + 1)
    if len(found.shape) > len(is_here.shape):
        is_here = is_here[..., None]
    return tf.where(is_here, found, tf.zeros([], found.dtype))
