"""Promise: each piece is written once, by a rank that has it; ranks write about as much."""

import pytest

from dtransformer.trainers.checkpoint.parts import plan_parts


def held_by(num_data, num_model, num_weights=20):
    """What ranks hold: weights cut over the model ranks, norms that all have, flat slices."""
    held = []
    for rank in range(num_data * num_model):
        data, model = divmod(rank, num_model)
        pieces = {}
        for number in range(num_weights):
            width = 64 // num_model
            cut = (model * width, (model + 1) * width)
            pieces[f"kernel{number}", (cut, (0, 8))] = 4 * width * 8
            pieces[f"gamma{number}", ((0, 8),)] = 32
            pieces[f"slot{number}", (cut, (data, data + 1))] = 4 * width
            pieces[f"flat{number}", ((data, data + 1),)] = 64  # of weights that no axis cuts
        held.append(pieces)
    return held


GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("with_replicas", [False, True])
def test_each_piece_is_written_once_by_a_rank_that_has_it(grid, with_replicas):
    held = held_by(*grid)
    parts = [part for part in plan_parts(held, with_replicas) if part.copy_of is None]
    written = [key for part in parts for key in part.keys]
    assert len(written) == len(set(written))
    assert set(written) == {key for pieces in held for key in pieces}
    assert all(key in held[part.writer] for part in parts for key in part.keys)


@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_write_about_as_much(grid):
    held = held_by(*grid)
    load = [0] * len(held)
    for part in plan_parts(held):
        load[part.writer] += sum(held[part.writer][key] for key in part.keys)
    largest = max(size for pieces in held for size in pieces.values())
    assert max(load) - min(load) <= largest


@pytest.mark.parametrize("grid", GRIDS)
def test_a_part_that_another_rank_has_gets_a_replica(grid):
    held = held_by(*grid)
    parts = plan_parts(held, with_replicas=True)
    copies = {part.copy_of: part for part in parts if part.copy_of is not None}
    for number, part in enumerate(parts):
        if part.copy_of is not None:
            continue
        others = [
            rank
            for rank, pieces in enumerate(held)
            if rank != part.writer and all(key in pieces for key in part.keys)
        ]
        assert (number in copies) == bool(others)
        if others:
            assert copies[number].keys == part.keys
            assert copies[number].writer in others


def test_the_plan_does_not_depend_on_the_order_of_pieces():
    held = held_by(2, 2)
    turned = [dict(reversed(pieces.items())) for pieces in held]
    assert plan_parts(held, True) == plan_parts(turned, True)
