"""Groups of ranks for the checks of collectives."""

import functools

from dtransformer.parallel.runtime import job


@functools.cache
def all_groups():
    """Return a group of all ranks and groups with other orders, identical on every rank."""
    orders = {2: [(1, 0)], 3: [(2, 0), (1, 2, 0)], 4: [(3, 1), (2, 0, 3, 1)]}[job.size()]
    groups = [job.world_group(), *map(job.new_group, orders)]
    for group in groups:
        job.new_group((group.ranks[0], group.ranks[-1]))  # `send` and `recv` need groups of two.
    return groups


def my_groups():
    return [group for group in all_groups() if group.index is not None]
