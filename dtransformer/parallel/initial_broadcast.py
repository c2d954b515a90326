"""Broadcast of initial values, so that all ranks start with the same ones."""

import collections
import math

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.division import pack_consecutive
from dtransformer.parallel.mesh.variable import MeshVariable, sharding_specs
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group
from dtransformer.parallel.weights.sharded_variable import ShardedVariable, get_local_shards

# Send values in large messages, because Horovod adds latency to each message.
_MESSAGE_BYTES = 2**25


def initial_broadcast(network_variables: list, optimizer_variables: list) -> None:
    """Copy the values of the first rank with the same shards.

    Args:
        network_variables: List of Keras variables. Replicated ones are copied from rank 0.
        optimizer_variables: List of Keras variables, one or more per shard.
    """
    for group, shards in shared_shards(network_variables, optimizer_variables).items():
        broadcast_values(shards, group)


def broadcast_values(variables: list, group: Group) -> None:
    """Copy the values of unsharded Keras variables from the first rank of a group."""
    sizes = [math.prod(x.shape) * tf.as_dtype(x.dtype).size for x in variables]
    for index, positions in enumerate(pack_consecutive(sizes, _MESSAGE_BYTES)):
        batch = [variables[i] for i in positions]
        values = [variable.value for variable in batch]
        values = transport.broadcast_together(values, 0, group, f"initial_broadcast_{index}")
        for variable, value in zip(batch, values):
            variable.assign(value)


def shared_shards(network_variables: list, optimizer_variables: list = ()) -> dict:
    """Return the shards that several ranks have in common.

    Args:
        network_variables: List of Keras variables of the network.
        optimizer_variables: List of Keras variables of the optimizer. Defaults to `()`.

    Returns:
        A dict of lists of Keras variables, keyed by the `Group` that shares them.
    """
    same_shards = job.data_parallel_group()
    shards = collections.defaultdict(list)  # Maps a group to its shards.
    for i, variable in enumerate([*network_variables, *optimizer_variables]):
        if isinstance(variable, ShardedVariable) and not isinstance(variable, MeshVariable):
            continue  # Each rank of the group has a different shard.
        is_replicated = i < len(network_variables) and not any(sharding_specs(variable))
        group = job.world_group() if is_replicated and job.stage()[1] == 1 else same_shards
        if group.size > 1:
            shards[group] += get_local_shards([variable])
    return shards
