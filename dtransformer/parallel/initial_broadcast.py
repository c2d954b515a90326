"""Ranks begin with the same values."""

import collections
import math

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.division import filled
from dtransformer.parallel.mesh.variable import MeshVariable, sharding_specs
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import ShardedVariable, own_shards

# Values travel together: each message waits for Horovod to ask what there is to send.
_MESSAGE_BYTES = 2**25


def initial_broadcast(network_variables: list, optimizer_variables: list) -> None:
    """Take the values of the first rank that has the same shards.

    Args:
        network_variables: list of Keras variables; replicated ones come from rank 0.
        optimizer_variables: list of Keras variables, one or more for each shard.
    """
    for group, own in shared_shards(network_variables, optimizer_variables).items():
        sizes = [math.prod(x.shape) * tf.as_dtype(x.dtype).size for x in own]
        for number, positions in enumerate(filled(sizes, _MESSAGE_BYTES)):
            some = [own[i] for i in positions]
            values = [shard.value for shard in some]
            values = transport.broadcast_together(values, 0, group, f"initial_broadcast_{number}")
            for shard, value in zip(some, values):
                shard.assign(value)


def shared_shards(network_variables: list, optimizer_variables: list = ()) -> dict:
    """Return what several ranks have alike: a dict of their groups, and lists of Keras variables.

    Args:
        network_variables, optimizer_variables: as of `initial_broadcast`.
    """
    same_shards = job.data_parallel_group()
    shards = collections.defaultdict(list)  # group -> what travels in it
    for number, variable in enumerate([*network_variables, *optimizer_variables]):
        if isinstance(variable, ShardedVariable) and not isinstance(variable, MeshVariable):
            continue  # each rank of the group has a shard of its own
        is_replicated = number < len(network_variables) and not any(sharding_specs(variable))
        group = job.whole_job() if is_replicated and job.stage()[1] == 1 else same_shards
        if group.size > 1:
            shards[group] += own_shards([variable])
    return shards
