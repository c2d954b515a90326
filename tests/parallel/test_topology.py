"""The topology arranges ranks in a grid and derives every process group from it."""

import math

import numpy as np
import pytest

from dtransformer import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import AXES, Topology

# stage, data, context, model
SHAPES = [
    (1, 1, 1, 1),
    (1, 2, 1, 4),
    (2, 2, 1, 2),
    (4, 1, 1, 1),
    (1, 1, 1, 6),
    (3, 2, 2, 2),
    (2, 3, 2, 3),
    (1, 7, 3, 1),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def grid(shape):
    return Topology(**dict(zip(AXES, shape)))


@each_shape
def test_groups_match_the_rank_grid(shape):
    """With one device per rank, the model axis varies fastest and the stage axis slowest."""
    topology, ranks = grid(shape), np.arange(math.prod(shape)).reshape(shape)
    assert topology.size == ranks.size and topology.shape == shape
    for coordinates, rank in np.ndenumerate(ranks):
        stage, data, context, model = coordinates
        mesh, replicas = ranks[stage, data].reshape(-1), ranks[stage, :, context, model]
        assert topology.get_stage(rank) == stage
        assert topology.data_shard(rank) == (data, shape[1])
        assert topology.model_parallel_group(rank) == tuple(mesh)
        assert topology.data_parallel_group(rank) == tuple(replicas)
        assert topology.pipeline_group(rank) == tuple(ranks[:, data, context, model])


def test_data_parallel_replicas_are_one_mesh_apart():
    topology = Topology(data=2, model=4)
    groups = [topology.data_parallel_group(rank) for rank in range(4)]
    assert groups == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert topology.model_parallel_group(5) == (4, 5, 6, 7)


def test_pipeline_stages_are_half_the_job_apart():
    """Each of the two stages has two meshes of two ranks."""
    topology = Topology(stage=2, data=2, model=2)
    meshes = tuple(
        dict.fromkeys(topology.model_parallel_group(rank) for rank in range(topology.size))
    )
    assert meshes == ((0, 1), (2, 3), (4, 5), (6, 7))
    stages = [topology.pipeline_group(rank) for rank in range(4)]
    assert stages == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [topology.data_parallel_group(rank) for rank in (0, 5)] == [(0, 2), (5, 7)]


@pytest.mark.parametrize(
    "fields, num_ranks, shape",
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 5, (1, 5, 1, 1)),
        ({"model_parallel": 4}, 8, (1, 2, 1, 4)),
        ({"model_parallel": 2, "pipeline_stage": 2, "context_parallel": 3}, 24, (2, 2, 3, 2)),
    ],
)
def test_topology_matches_the_degrees_of_the_config(fields, num_ranks, shape):
    topology = Topology.from_config(TransformerOpParallelConfig(**fields), num_ranks)
    assert topology == grid(shape) and topology.size == num_ranks


def test_config_must_fit_the_number_of_ranks():
    with pytest.raises(ValueError, match="model_parallel=4.*has 6"):
        Topology.from_config(TransformerOpParallelConfig(model_parallel=4), 6)


def test_topology_string_lists_axes_larger_than_one():
    assert str(Topology()) == "one rank"
    assert str(Topology(stage=2, data=3, model=4)) == "stage 2 · data 3 · model 4"


@pytest.mark.parametrize(
    "fields, meshes, data_parallel_groups, shards",
    [
        # One device per rank.
        (
            dict(data=2, model=2),
            ((0, 1), (2, 3)),
            ((0, 2), (1, 3)),
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
        # Model axis within a rank, model axis over two ranks, data axis within a rank.
        (dict(data=2, model=2, local_devices=2), ((0,), (1,)), ((0, 1),), [(0, 2), (1, 2)]),
        (dict(model=4, local_devices=2), ((0, 1),), ((0,), (1,)), [(0, 1), (0, 1)]),
        (dict(data=4, model=2, local_devices=4), ((0,), (1,)), ((0, 1),), [(0, 2), (1, 2)]),
        (dict(data=2, model=4, local_devices=8), ((0,),), ((0,),), [(0, 1)]),
        # Two pipeline stages: data-parallel groups stay within a stage.
        (
            dict(stage=2, data=2, model=2, local_devices=2),
            ((0,), (1,), (2,), (3,)),
            ((0, 1), (2, 3)),
            [(0, 2), (1, 2), (0, 2), (1, 2)],
        ),
        # Experts sharded over two of four replicas: two meshes, each with all experts.
        (
            dict(data=4, expert=2),
            ((0, 1), (2, 3)),
            ((0, 2), (1, 3)),
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
        (dict(data=2, model=2, expert=2), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), [(0, 1)] * 4),
    ],
)
def test_meshes_data_parallel_groups_and_data_shards(fields, meshes, data_parallel_groups, shards):
    topology = Topology(**fields)
    ranks = range(topology.num_ranks)
    assert tuple(dict.fromkeys(map(topology.model_parallel_group, ranks))) == meshes
    assert tuple(dict.fromkeys(map(topology.data_parallel_group, ranks))) == data_parallel_groups
    assert [topology.data_shard(rank) for rank in ranks] == shards


@pytest.mark.parametrize("fields", [dict(model=4, local_devices=3), dict(data=3, local_devices=2)])
def test_local_devices_must_divide_the_mesh(fields):
    with pytest.raises(ValueError, match=f"`local_devices={fields['local_devices']}` must divide"):
        Topology(**fields)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(data=4, expert=3), "`expert_parallel=3` must divide `data_parallel=4`"),
        (dict(data=4, expert=2, local_devices=4), "local_devices=4.*Set `expert_parallel=4` or 1"),
        (dict(data=4, expert=2, mesh_spans_data=True), "optimizer_shard=3.*or `optimizer_shard=2`"),
        (dict(data=12, expert=6, local_devices=4), "local_devices=4.*meshes of 6 devices"),
    ],
)
def test_expert_parallelism_must_fit_the_mesh(fields, words):
    with pytest.raises(ValueError, match=words):
        Topology(**fields)
