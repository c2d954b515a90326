"""Storage of new values after an update: all-gather parts, assign shards."""

import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.collectives.transport import by_dtype
from dtransformer.parallel.runtime import job


def store(units, buckets, values):
    """Assign new values to the weights that an update has not assigned yet.

    Each bucket of gradients has one all-gather per dtype.

    Args:
        units: `UpdateUnits`.
        buckets: List of lists of positions in the shard plan.
        values: List of tensors. New values of the units' `ParameterProxy`s.
    """
    shards = units.shards
    parts = units.new_parts(values)
    for index, bucket in enumerate(buckets):
        replicated = [i for i in bucket if shards[i].replicated is not None]
        _all_gather([shards[i] for i in replicated], [parts[i] for i in replicated], index)
    for unit in units.proxies:
        for i in unit.positions:
            if shards[i].replicated is None:
                variable = shards[i].shard
                variable.assign(tf.reshape(parts[i], variable.shape))


def _all_gather(shards, parts, bucket_index):
    def gather(parts, shapes, divisions, dtype):
        name = f"weights_{bucket_index}_{dtype}"
        return flat_shards.all_gather(parts, shapes, job.data_parallel_group(), name, divisions)

    full = by_dtype(
        gather,
        [tf.cast(part, shard.replicated.dtype) for part, shard in zip(parts, shards)],
        [shard.replicated.shape for shard in shards],
        [shard.division for shard in shards],
    )
    for shard, value in zip(shards, full):
        shard.replicated.assign(value)
