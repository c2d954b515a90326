"""A context plan computes every visible pair once, with equal work on all shards."""

import itertools

import numpy as np
import pytest

from dtransformer.parallel.context_parallel.plan import ContextPlan, count_head_parts, make_plan
from tests.parallel.context_parallel.formula import elements_sent

MODES = "ulysses", "all_gather", "ring"
MASKS = [(False, None), (True, None), (True, 7), (False, 5)]


def count_pairs(plan, shard, causal, window, rows=3, columns=5, by_position=True):
    """Count how often a shard computes each pair of positions: int array [s, t]."""
    counts = np.zeros([plan.num_queries, plan.num_keys], int)
    keys_per_shard = plan.num_keys // plan.shards
    for segments, (first, last) in zip(plan.rounds, plan.round_parts, strict=True):
        if plan.has_all_positions or last - first == keys_per_shard:
            key_positions = np.arange(plan.num_keys)
        else:
            parts = np.arange(plan.num_keys).reshape(plan.shards, keys_per_shard)[:, first:last]
            key_positions = parts.reshape(-1)
        for row in plan.rows(rows):
            queries = list(plan.positions(shard))[slice(*row)]
            for block in plan.columns(row, segments, causal, window, columns, by_position):
                keys = key_positions[block.start : block.end]
                if block.position is not None:
                    assert keys.tolist() == list(range(block.position, block.position + len(keys)))
                counts[np.ix_(queries, keys)] += 1
                if plan.are_all_near(row, block, causal, window):
                    assert visible(plan, causal, window)[np.ix_(queries, keys)].all()
    return counts


def visible(plan, causal, window):
    distance = np.arange(plan.num_queries)[:, None] - np.arange(plan.num_keys)[None, :]
    allowed = distance >= 0 if causal else np.ones_like(distance, bool)
    if window is not None:
        allowed &= (distance < window) & (causal | (distance > -window))
    return allowed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards, length", [(2, 16), (4, 32), (4, 24), (3, 27)])
@pytest.mark.parametrize("causal, window", MASKS)
def test_every_visible_pair_is_computed_once(mode, shards, length, causal, window):
    check_pairs(
        ContextPlan(mode, shards, length, length, causal and length % shards**2 == 0),
        causal,
        window,
    )


@pytest.mark.parametrize("shards, ulysses_shards, length", [(4, 2, 24), (8, 2, 32), (6, 3, 36)])
@pytest.mark.parametrize("causal, window", MASKS)
def test_every_part_of_the_heads_has_its_ring(shards, ulysses_shards, length, causal, window):
    plan = ContextPlan("ulysses_ring", shards, length, length, True, ulysses_shards)
    check_pairs(plan, causal, window)
    assert len(plan.rounds) == shards // ulysses_shards


def check_pairs(plan, causal, window):
    """Check that the shards of each part of the heads compute every visible pair once."""
    u = plan.head_parts
    for head_part in range(u):
        shards = range(head_part, plan.shards, u)
        counts = [count_pairs(plan, shard, causal, window) for shard in shards]
        assert sum(counts).max() == 1
        assert (sum(counts) >= visible(plan, causal, window)).all()
        positions = [plan.positions(shard) for shard in shards]
        assert sorted(itertools.chain(*positions)) == list(range(plan.num_queries))


@pytest.mark.parametrize("mode", ["all_gather", "ring", "ulysses_ring"])
def test_causal_work_is_equal_on_all_shards(mode):
    plan = make_plan(mode, 4, (1, 8, 64, 4), (1, 8, 64, 4), causal=True, has_bias=False)
    work = [count_pairs(plan, shard, True, None, 1, 1).sum() for shard in range(4)]
    assert len(set(work)) == 1
    parts = plan.position_parts
    assert work[0] <= 64 * (64 / parts + parts) / 2, "at most half of all scores plus the diagonal"


def test_cross_attention_covers_keys_of_another_length():
    plan = ContextPlan("ring", 4, 8, 20)
    for shard in range(4):
        counts = count_pairs(plan, shard, False, None, by_position=False)
        assert (counts[list(plan.positions(shard))] == 1).all()


@pytest.mark.parametrize(
    "mode, heads, length, expected",
    [
        ("auto", (8, 4), 64, "ulysses"),
        ("auto", (8, 2), 64, "all_gather"),
        ("auto", (8, 2), 2**17, "ring"),
        ("ulysses", (8, 2), 64, "ulysses"),
        ("ring", (8, 4), 64, "ring"),
    ],
)
def test_auto_mode_depends_on_heads_and_length(mode, heads, length, expected):
    (n, m), d = heads, 64
    plan = make_plan(mode, 4, (1, n, length, d), (1, m, length, d), True, False)
    assert plan.mode == expected


@pytest.mark.parametrize(
    "shards, heads, requested, expected",
    [
        (4, (8, 4), None, ("ulysses_ring", 2)),
        (8, (8, 4), None, ("ulysses_ring", 4)),
        (8, (8, 2), None, ("ulysses_ring", 2)),
        (8, (8, 2), 4, ("ulysses_ring", 4)),
        (6, (8, 4), None, ("ulysses_ring", 2)),
        (4, (7, 7), None, ("ring", 1)),
        (2, (8, 8), None, ("ring", 1)),
        (4, (8, 4), 1, ("ring", 1)),
        (4, (8, 4), 4, ("ulysses", 4)),
    ],
)
def test_ulysses_shards_divide_heads_and_leave_a_ring(shards, heads, requested, expected):
    n, m = heads
    sizes = (1, n, 144 * 4, 4), (1, m, 144 * 4, 4)
    plan = make_plan("ulysses_ring", shards, *sizes, True, False, ulysses_shards=requested)
    assert (plan.mode, plan.head_parts) == expected


def test_formula_matches_published_volumes():
    """Ulysses sends `(c - 1) / c` of queries, keys, values and context, the others all keys."""
    b, n, m, d, s, c = 2, 8, 4, 16, 64, 4
    queries, keys = b * n * d * s // c, 2 * b * m * d * s // c
    by_heads = (c - 1) * (2 * queries + keys) // c
    plan = ContextPlan("ulysses", c, s, s)
    assert elements_sent(plan, b, n, m, d) == {"forward": by_heads, "backward": by_heads}
    for mode in ("all_gather", "ring"):
        plan = ContextPlan(mode, c, s, s)
        sent = {"forward": (c - 1) * keys, "backward": 2 * (c - 1) * keys}
        assert elements_sent(plan, b, n, m, d) == sent
        stripes = (c - 1) * 2 * queries // c
        plan = ContextPlan(mode, c, s, s, is_striped=True)
        striped = {kind: elements + stripes for kind, elements in sent.items()}
        assert elements_sent(plan, b, n, m, d) == striped
        # A ring for each of u parts of the heads sends 1/u of the keys.
        u = 2
        plan = ContextPlan("ulysses_ring", c, s, s, True, u)
        by_parts = {kind: elements // u + stripes for kind, elements in sent.items()}
        assert elements_sent(plan, b, n, m, d) == by_parts


def test_indivisible_length_raises_an_error():
    with pytest.raises(ValueError, match="`context_parallel=4` must divide .* got 30. Pad .* 32"):
        make_plan("auto", 4, (1, 8, 30, 4), (1, 8, 30, 4), True, False)
    with pytest.raises(ValueError, match="`ulysses_shards=2` needs .* 8 positions, got 20. .* 24"):
        make_plan("ulysses_ring", 4, (1, 8, 20, 4), (1, 8, 20, 4), False, False)


@pytest.mark.parametrize("n, m", [(6, 6), (8, 3), (2, 2)])
def test_indivisible_heads_raise_an_error(n, m):
    with pytest.raises(ValueError, match="'ulysses'` divides heads.*=4`, .* Set .*'all_gather'"):
        count_head_parts("ulysses", 4, n, m, None)
    with pytest.raises(ValueError, match="'ulysses_ring'` divides .*`ulysses_shards=4`, .* None."):
        count_head_parts("ulysses_ring", 8, n, m, 4)
