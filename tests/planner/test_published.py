"""Estimates agree with published tables: exactly for formulas, within limits for step times.

The A100 constants are fitted to table 1 and to the layouts of `published.FITTED_MODELS`. The
layouts of `published.HELD_OUT_MODELS`, table 5 and table 2 are only used for tests.
"""

import pathlib

import pytest

from dtransformer.planner.clusters import A100, DEVICES, HOPPER, get_device
from harness.published_tables import compared, published
from harness.published_tables.compared import pages, with_written_part


@pytest.mark.parametrize(
    "make", [compared.sizes, compared.step_seconds, compared.model_states, compared.activations]
)
def test_formulas_match_printed_values(make):
    assert [row for row in make().rows if not row.is_same] == []


def test_seconds_of_table_1_follow_from_its_tflops():
    """The formula in section 5.1 converts the printed TFLOP/s to seconds."""
    printed = 3.53, 3.70, 3.70, 9.40, 14.45, 16.06, 24.82, 37.61, 54.08, 102.63
    seconds = [round(row.step.seconds, 2) for row in published.table_1()]
    assert seconds == list(printed)


def test_step_times_match_table_1():
    table = compared.table_1()
    assert table.mean_error <= 0.05
    assert table.worst_error <= 0.10


def test_step_times_match_table_5():
    for table in compared.table_5():
        assert table.worst_error <= 0.10, table.title


def test_zero_3_scales_worse_than_tensor_and_pipeline():
    """Table 2 has 144 to 44 TFLOP/s per device for ZeRO-3 on 384 to 1,536 devices, and 153 to 141."""
    parallel, zero = (
        [row.ours for row in table.rows if row.what.startswith("gpt_175b")]
        for table in compared.table_2()
    )
    assert zero[-1] * 1536 / (zero[0] * 384) >= 2.5
    assert parallel[-1] * 1536 / (parallel[0] * 384) <= 1.10


def test_error_on_held_out_layouts_is_small():
    assert set(published.FITTED_MODELS).isdisjoint(published.HELD_OUT_MODELS)
    assert {*published.FITTED_MODELS, *published.HELD_OUT_MODELS} == {*published.LAYOUT_MODELS}
    assert compared.held_out_error() <= 0.12


def test_all_layouts_are_included():
    assert sum(len(published.make_layouts(model)) for model in published.LAYOUT_MODELS) == 109


@pytest.mark.parametrize("model", published.LAYOUT_MODELS)
def test_chosen_layout_is_nearly_the_fastest(model):
    assert compared.make_layouts(model).regret <= 0.05


def test_two_sets_of_constants_cover_all_gpus():
    """V100 lacks fused attention, and H200 needs fewer rows and features, due to its memory."""
    changed = {"v100": {"attention_share"}, "h200": {"half_rows", "half_features"}}
    for name, device in DEVICES.items():
        base = A100 if name[:4] in ("v100", "a100") else HOPPER
        differences = {key for key, x in vars(device.constants).items() if x != getattr(base, key)}
        assert differences == changed.get(name[:4], set())


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_half_sizes_grow_with_flops_per_byte(name):
    device, a100 = get_device(name), get_device("a100-80")
    ratio = (device.tflops_16_bit / device.memory_gb_per_second) / (
        a100.tflops_16_bit / a100.memory_gb_per_second
    )
    for key in ("half_rows", "half_features"):
        planned = getattr(device.constants, key)
        assert planned == pytest.approx(ratio * getattr(A100, key), rel=0.02)


def test_pages_contain_the_current_tables():
    """Run `python benchmarks/planner_page.py` if this fails."""
    docs = pathlib.Path(__file__).parents[2] / "docs"
    for name, part in pages().items():
        text = (docs / name).read_text("utf-8")
        assert with_written_part(text, part) == text, name
