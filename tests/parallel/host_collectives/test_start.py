"""Promise: groups go through shared memory where all of their ranks are on one host."""

import pytest

from dtransformer.parallel.host_collectives.start import DATA_PARALLEL, MESH, shared_groups
from dtransformer.parallel.topology import Topology


def shared(topology, hosts):
    """Return what each rank's groups share, where ranks are on hosts: a text of a letter a rank."""
    groups = {MESH: topology.model_parallel_group, DATA_PARALLEL: topology.data_parallel_group}
    found = [
        [key for key, group in groups.items() if len({hosts[r] for r in group(rank)}) == 1]
        for rank in range(topology.num_ranks)
    ]
    return [set(shared_groups(topology, rank, found)) for rank in range(topology.num_ranks)]


@pytest.mark.parametrize(
    ("axes", "hosts", "expected"),
    [
        ({"data": 2}, "aa", [{DATA_PARALLEL}] * 2),
        ({"data": 2}, "ab", [set()] * 2),
        ({"model": 2}, "aa", [{MESH}] * 2),
        ({"model": 2}, "ab", [set()] * 2),
        ({"stage": 2}, "aa", [set()] * 2),
        ({"data": 2, "model": 2}, "aaaa", [{MESH, DATA_PARALLEL}] * 4),
        ({"data": 2, "model": 2}, "aabb", [{MESH}] * 4),
        ({"stage": 2, "data": 2}, "aabb", [{DATA_PARALLEL}] * 4),
        # Ranks 4 and 0 share memory, and the mesh of rank 4 is on two hosts.
        ({"data": 2, "model": 4}, "aaaaabbb", [{MESH}] * 4 + [set()] * 4),
    ],
)
def test_which_groups_share_memory(axes, hosts, expected):
    assert shared(Topology(**axes), hosts) == expected
