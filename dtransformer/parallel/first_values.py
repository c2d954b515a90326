"""Ranks begin with the same values."""

from dtransformer.parallel import job
from dtransformer.parallel.dtensor.variable import MeshVariable, specs_of
from dtransformer.parallel.sharded_variable import ShardedVariable, own_shards


def broadcast_first_values(network_variables, optimizer_variables):
    """Take the values of the first rank that has the same slices.

    Args:
        network_variables: list of Keras variables; whole ones come from rank 0.
        optimizer_variables: list of Keras variables, one or more for each shard.
    """
    hvd, group = job.horovod(), job.data_parallel_group()
    if hvd is None:
        return
    alike = {"root_rank": group.ranks[0], "process_set": group.process_set}
    for number, variable in enumerate([*network_variables, *optimizer_variables]):
        is_parted = isinstance(variable, ShardedVariable)
        is_whole = number < len(network_variables) and not any(specs_of(variable))
        is_whole = is_whole and job.stage()[1] == 1
        if not is_whole and group.size == 1 or is_parted and not isinstance(variable, MeshVariable):
            continue
        for position, shard in enumerate(own_shards([variable])):
            name = f"first_value_{number}_{position}"
            ranks = {"root_rank": 0} if is_whole else alike
            shard.assign(hvd.broadcast(shard.value, name=name, **ranks))
