"""Ranks begin with the same values."""

import collections
import math
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.dtensor.variable import MeshVariable, specs_of
from dtransformer.parallel.process_groups import Group
from dtransformer.parallel.sharded_variable import ShardedVariable, own_shards

# Values travel together: each message waits for Horovod to ask what there is to send.
_MESSAGE_BYTES = 2**25


def broadcast_first_values(network_variables: list, optimizer_variables: list) -> None:
    """Take the values of the first rank that has the same shards.

    Args:
        network_variables: list of Keras variables; replicated ones come from rank 0.
        optimizer_variables: list of Keras variables, one or more for each shard.
    """
    same_shards = job.data_parallel_group()
    together = collections.defaultdict(list)  # (group, type) -> shards
    for number, variable in enumerate([*network_variables, *optimizer_variables]):
        if isinstance(variable, ShardedVariable) and not isinstance(variable, MeshVariable):
            continue  # each rank of the group has a shard of its own
        is_replicated = number < len(network_variables) and not any(specs_of(variable))
        group = job.whole_job() if is_replicated and job.stage()[1] == 1 else same_shards
        for shard in own_shards([variable]):
            together[group, shard.dtype].append(shard)
    for (group, dtype), shards in together.items():
        if group.size > 1:
            for number, some in enumerate(_messages(shards)):
                _broadcast(some, group, f"first_values_{dtype}_{number}")


def _messages(shards: list) -> Iterator[list]:
    some, num_bytes = [], 0
    for shard in shards:
        size = math.prod(shard.shape) * tf.as_dtype(shard.dtype).size
        if some and num_bytes + size > _MESSAGE_BYTES:
            yield some
            some, num_bytes = [], 0
        some.append(shard)
        num_bytes += size
    yield some


def _broadcast(shards: list, group: Group, name: str) -> None:
    flat = [tf.reshape(shard.value, [-1]) for shard in shards]
    everyones = transport.broadcast(tf.concat(flat, 0), 0, group, name)
    for shard, value in zip(shards, tf.split(everyones, [x.shape[0] for x in flat])):
        shard.assign(tf.reshape(value, shard.shape))
