"""Ranks begin with the same values."""

from dtransformer.parallel import job
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.dtensor.variable import MeshVariable, specs_of
from dtransformer.parallel.sharded_variable import ShardedVariable, own_shards


def broadcast_first_values(network_variables: list, optimizer_variables: list) -> None:
    """Take the values of the first rank that has the same shards.

    Args:
        network_variables: list of Keras variables; replicated ones come from rank 0.
        optimizer_variables: list of Keras variables, one or more for each shard.
    """
    same_shards = job.data_parallel_group()
    for number, variable in enumerate([*network_variables, *optimizer_variables]):
        if isinstance(variable, ShardedVariable) and not isinstance(variable, MeshVariable):
            continue  # each rank of the group has a shard of its own
        is_replicated = number < len(network_variables) and not any(specs_of(variable))
        group = job.whole_job() if is_replicated and job.stage()[1] == 1 else same_shards
        if group.size == 1:
            continue
        for position, shard in enumerate(own_shards([variable])):
            name = f"first_value_{number}_{position}"
            shard.assign(transport.broadcast(shard.value, 0, group, name))
