"""Formulas agree with counts from schedules, the simulator and networks."""

import numpy as np
import pytest

from dtransformer.limits import MIN_BLOCKWISE_SCORES
from dtransformer.parallel.schedules.instruction import BACKWARD, FORWARD
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.parallel.schedules.schedules import SCHEDULES, instructions
from dtransformer.parallel.schedules.simulator import simulate
from dtransformer.planner import get_model
from dtransformer.planner.formulas import (
    BlockSizes,
    bubble_passes,
    micro_batches_alive,
    saved_activation_bytes,
)
from dtransformer.planner.stages import stage_kinds

PIPELINES = [(2, 4, 1), (4, 8, 1), (4, 16, 1), (2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 2)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_alive_and_bubbles_match_the_schedule(name):
    schedule = SCHEDULES[name]
    for p, m, v in PIPELINES:
        if not schedule.allows(v):
            continue
        placement = schedule.place(p, v)
        stages = instructions(name, placement, m)
        for index, stage in enumerate(stages):
            change = [
                (instruction.kind == FORWARD) - (instruction.kind == BACKWARD)
                for instruction in stage
            ]
            maximum = max(np.cumsum(change)) / v
            assert micro_batches_alive(name, p, index, m, v) == pytest.approx(maximum)
        # A forward pass, input gradients and weight gradients take one unit of time each.
        backward = (1 if schedule.divides_backward else 2) / v
        timeline = simulate(stages, placement, 1 / v, backward, weight_gradients=1 / v)
        end = max(event.end for event in timeline.events)
        exact = (end - 3 * m) / 3
        # zb_v has no closed form, so its formula is an upper bound.
        maximum = exact + (0.25 if name == "zb_v" else 0)
        assert exact - 1e-9 <= bubble_passes(name, p, v) <= maximum + 1e-9


# Korthikanti et al., 2022, table 2, at the sizes of the 22 B model, in units of s·b·h.
PUBLISHED = [
    (140.7, dict(model_parallel=1)),
    (26.3, dict(model_parallel=8)),
    (17.6, dict(model_parallel=8, is_sequence_sharded=True)),
    (13.0, dict(model_parallel=8, recomputed=("attention",))),
    (4.25, dict(model_parallel=8, recomputed=("attention",), is_sequence_sharded=True)),
    (2.0, dict(model_parallel=8, recomputes_block=True)),
    (0.25, dict(model_parallel=8, recomputes_block=True, is_input_sharded=True)),
]


@pytest.mark.parametrize("expected, choice", PUBLISHED)
def test_activation_bytes_match_published_values(expected, choice):
    s, h = 2048, 6144
    sizes = BlockSizes(s, [s], h, 64, head_dim=96, num_kv_heads=64, ffn_hidden_size=4 * h)
    saved = saved_activation_bytes(sizes, **choice)
    assert float(saved) / (s * h) == pytest.approx(expected, abs=0.05)


@pytest.mark.tensorflow
def test_blockwise_attention_has_the_same_threshold_as_layers():
    from dtransformer.layers import attention_core

    below = attention_core.chosen_implementation("auto", 1, MIN_BLOCKWISE_SCORES - 1)
    assert below == "reference"
    assert attention_core.chosen_implementation("auto", 1, MIN_BLOCKWISE_SCORES) == "blockwise"


def test_stages_contain_all_blocks():
    for name, p, v in (("gpt_530b", 35, 3), ("gpt_530b", 8, 1), ("transformer_big", 4, 1)):
        model = get_model(name)
        stages = stage_kinds(model, Placement.looped(p, v))
        assert stages[0].has_embedding and any(stage.has_head for stage in stages)
        maximum = max(sum(stage.blocks) for stage in stages)
        assert maximum <= v * -(-model.num_blocks // (p * v))
