"""Plans state the training hours, a default batch with its reason, and their accuracy."""

import json
import re

import pytest

from dtransformer.cli import main
from dtransformer.planner import Cluster, Job, get_device, get_model, plan
from dtransformer.planner.budget import default_batch, optimal_batch_tokens, training_hours
from dtransformer.planner.machine import cpu_device
from dtransformer.planner.plain_bfloat16 import bfloat16_hint
from harness.published_tables import compared, published

ASK = ["plan", "--model", "llama2-7b", "--devices", "8", "--device", "h100", "--top", "3"]


def test_hours_are_tokens_divided_by_throughput(capsys):
    ask = [*ASK, "--global-batch", "64", "--tokens", "1e9"]
    assert main([*ask, "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert len(layouts) == 3
    for layout in layouts:
        steps = 1e9 / (64 * 4096)
        assert layout["hours"] == pytest.approx(steps * layout["step_seconds"] / 3600)
        assert layout["device_hours"] == pytest.approx(8 * layout["hours"])
    assert main(ask) == 0
    header, _, *rows = capsys.readouterr().out.split("\n")[3:8]
    assert header.split()[-2:] == ["hours", "GPU-hours"]
    for row, layout in zip(rows, layouts, strict=True):
        hours, gpu_hours = map(float, row.split()[-2:])
        assert hours == pytest.approx(layout["hours"], rel=0.005)
        assert gpu_hours == pytest.approx(layout["device_hours"], rel=0.005)


def test_no_hours_without_tokens(capsys):
    assert main([*ASK, "--global-batch", "64"]) == 0
    assert "hours" not in capsys.readouterr().out
    assert main([*ASK, "--global-batch", "64", "--json"]) == 0
    assert "hours" not in json.loads(capsys.readouterr().out)["layouts"][0]


@pytest.mark.parametrize("tokens", ["0", "-1", "nan", "inf"])
def test_tokens_must_be_a_positive_number(tokens, capsys):
    assert main([*ASK, f"--tokens={tokens}"]) == 2
    assert "--tokens must be a positive number" in capsys.readouterr().err


def test_default_batch_is_compute_optimal():
    """DeepSeek-AI, 2024: 0.2920 C^0.3271 tokens. C counts products with weights and attention."""
    assert optimal_batch_tokens(1e20) == pytest.approx(0.2920 * 10 ** (20 * 0.3271))
    model = get_model("llama2_7b")
    flops = (6 * 6.607e9 + 6 * 2 * 32 * 4096 * 4096) * 1e9
    target = 0.2920 * flops**0.3271 / 4096
    sequences, reason = default_batch(model, 8, tokens=1e9)
    assert sequences == 256 and 2**-0.5 < sequences / target < 2**0.5
    assert "256 sequences, 1,048,576 tokens" in reason and "1 B tokens (--tokens;" in reason
    sequences, reason = default_batch(model, 8)
    assert sequences == 1024 and "135 B tokens (20 per parameter;" in reason


@pytest.mark.parametrize("devices", [1, 6, 8, 96])
def test_devices_divide_the_default_batch(devices):
    sequences, _ = default_batch(get_model("gpt2_small"), devices)
    doublings = sequences // devices
    assert sequences % devices == 0 and doublings & (doublings - 1) == 0


@pytest.mark.parametrize("frozen", [{"adapter_rank": 8}, {"frozen_blocks": 4}])
def test_fine_tuning_uses_the_default_batch_of_training(frozen):
    sequences, reason = default_batch(get_model("llama2_7b", **frozen), 8, tokens=1e9)
    assert sequences == 32 and "the default of training.batch_size" in reason
    assert default_batch(get_model("llama2_7b", **frozen), 64)[0] == 64


def test_command_explains_its_default_batch(capsys):
    assert main(ASK) == 0
    printed = capsys.readouterr().out
    assert "global batch 1,024," in printed and "batch_size: 1024" in printed
    assert "--global-batch is missing, so this is the compute-optimal batch" in printed
    assert main([*ASK, "--global-batch", "64"]) == 0
    assert "--global-batch is missing" not in capsys.readouterr().out
    assert main([*ASK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("Global batch: 1,024 ")


def test_stated_accuracy_equals_the_measured_error():
    """docs/planner-tables.md lists the steps. The largest error is a layout of the 39 B model."""
    stated = get_device("a100").accuracy()
    steps, mean, worst = map(int, re.findall(r"(\d+)(?: measured|%)", stated))
    tables = [compared.make_layouts(model) for model in published.HELD_OUT_MODELS]
    assert steps == sum(len(table.rows) for table in tables)
    assert mean == round(100 * compared.held_out_error())
    assert worst == round(100 * max(table.worst_error for table in tables))
    assert f"{mean}% off on average and {worst}% at most" in get_device("h200").accuracy()
    published_steps, left_out = compared.h100_steps(), compared.h100_left_out()
    assert re.findall(r"(\d+)%", get_device("h100").accuracy()) == [
        f"{100 * error:.0f}"
        for error in (published_steps.mean_error, published_steps.worst_error, left_out.mean_error)
    ]


def test_every_kind_of_device_states_its_accuracy(tmp_path, capsys):
    path = tmp_path / "device.yaml"
    path.write_text("base: a100\nbetween_gb_per_second: 1\n")
    ask = ["plan", "--model", "gpt2-small", "--devices", "1", "--global-batch", "8"]
    for device, statement in {
        "a100": "On A100, 68 measured steps",
        "v100": "No job on several of these GPUs was compared with a measured one.",
        "h100": "On H100, four published steps",
        str(path): "This device's figures were entered by hand",
    }.items():
        assert main([*ask, "--device", device]) == 0
        printed = capsys.readouterr().out
        assert f"\n{statement}" in printed and "\nAssumptions: " in printed
    assert "another CPU" in cpu_device(2, 16, 1).accuracy()


# Models with adapters whose float32 weights fill a device, and the layout with bfloat16 weights.
HINTS = [
    ("llama2_13b", 1, "h100", 32, "one device · 32 micro-batches of 1,"),
    ("llama2_13b", 2, "h100", 32, "data 2 · 16 micro-batches of 1,"),
    ("llama2_13b", 4, "a100", 64, "data 4 · 16 micro-batches of 1,"),
]


@pytest.mark.parametrize("name, devices, device, batch, layout", HINTS)
def test_hints_at_a_simpler_layout_in_bfloat16(name, devices, device, batch, layout):
    model, cluster = get_model(name, adapter_rank=16), Cluster(get_device(device), devices)
    mixed = plan(model, cluster, Job(batch))
    hint = bfloat16_hint(mixed)
    assert hint.startswith("Simpler with --precision bfloat16") and layout in hint
    assert "Adapters stay in float32." in hint
    seconds = float(re.search(r"([\d.]+) s/step", hint)[1])
    assert seconds <= mixed.best.step_seconds * 1.02
    assert mixed.best.num_techniques > 0
    plain = plan(model, cluster, Job(batch, "bfloat16"), top=200)
    assert any(layout.rstrip(",") in cost.layout and cost.fits for cost in plain.costs)


def test_hints_at_bfloat16_if_nothing_else_fits():
    model, cluster = get_model("llama2_13b", adapter_rank=16), Cluster(get_device("a100-40"), 1)
    result = plan(model, cluster, Job(32))
    assert not result.fits
    assert bfloat16_hint(result).startswith("It fits with --precision bfloat16")


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "mixed_bfloat16"])
def test_no_hint_without_a_simpler_layout(precision):
    model, cluster = get_model("gpt2_small"), Cluster(get_device("h100"), 8)
    assert bfloat16_hint(plan(model, cluster, Job(64, precision))) == ""


def test_training_hours_match_the_formula():
    result = plan(get_model("gpt2_small"), Cluster(get_device("a100"), 8), Job(64))
    seconds = 1e9 / (64 * 1024) * result.best.step_seconds
    assert training_hours(result.best, 1e9) == pytest.approx(seconds / 3600)
