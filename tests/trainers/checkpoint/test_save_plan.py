"""Each shard is written once, by a rank that stores it, and ranks write similar amounts."""

import pytest

from dtransformer.trainers.checkpoint.writer import plan_files


def make_rank_shards(num_data, num_model, num_weights=20):
    """Return the shards of each rank: sharded kernels, replicated norms and flat shards."""
    rank_shards = []
    for rank in range(num_data * num_model):
        data, model = divmod(rank, num_model)
        shards = {}
        for index in range(num_weights):
            width = 64 // num_model
            columns = (model * width, (model + 1) * width)
            shards[f"kernel{index}", (columns, (0, 8))] = 4 * width * 8
            shards[f"gamma{index}", ((0, 8),)] = 32
            shards[f"slot{index}", (columns, (data, data + 1))] = 4 * width
            shards[f"flat{index}", ((data, data + 1),)] = 64  # ZeRO shard of a replicated weight.
        rank_shards.append(shards)
    return rank_shards


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("with_replicas", [False, True])
def test_each_shard_is_written_once_by_a_rank_that_stores_it(grid, with_replicas):
    rank_shards = make_rank_shards(*grid)
    files = [file for file in plan_files(rank_shards, with_replicas) if file.replica_of is None]
    written = [key for file in files for key in file.shards]
    assert len(written) == len(set(written))
    assert set(written) == {key for shards in rank_shards for key in shards}
    assert all(key in rank_shards[file.writer] for file in files for key in file.shards)


@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_write_similar_amounts(grid):
    rank_shards = make_rank_shards(*grid)
    load = [0] * len(rank_shards)
    for file in plan_files(rank_shards):
        load[file.writer] += sum(rank_shards[file.writer][key] for key in file.shards)
    largest = max(size for shards in rank_shards for size in shards.values())
    assert max(load) - min(load) <= largest


@pytest.mark.parametrize("grid", GRIDS)
def test_files_get_a_replica_if_another_rank_has_their_shards(grid):
    rank_shards = make_rank_shards(*grid)
    files = plan_files(rank_shards, with_replicas=True)
    replicas = {file.replica_of: file for file in files if file.replica_of is not None}
    for index, file in enumerate(files):
        if file.replica_of is not None:
            continue
        candidates = [
            rank
            for rank, shards in enumerate(rank_shards)
            if rank != file.writer and all(key in shards for key in file.shards)
        ]
        assert (index in replicas) == bool(candidates)
        if candidates:
            assert replicas[index].shards == file.shards
            assert replicas[index].writer in candidates


def test_plan_does_not_depend_on_the_order_of_shards():
    rank_shards = make_rank_shards(2, 2)
    reversed_shards = [dict(reversed(shards.items())) for shards in rank_shards]
    assert plan_files(rank_shards, True) == plan_files(reversed_shards, True)
