"""Planned H100 steps agree with Megatron-LM's published ones, also with each row left out."""

import csv
import dataclasses

import numpy as np
import pytest

from dtransformer.cli import main
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner import Cluster, Job, cost, get_device, get_model
from dtransformer.planner.clusters import HOPPER
from dtransformer.planner.job import REFERENCE
from harness.published_tables import compared, h100

# Milliseconds per step on one H200, docs/gpus.md, with and without fused attention.
H200_FUSED, H200_UNFUSED = 81, 98


def test_reference_system_matches_published_steps():
    table = compared.h100_steps()
    assert len(table.rows) == 4
    assert table.mean_error <= 0.06
    assert table.worst_error <= 0.08


def test_every_step_is_predicted_from_the_others():
    table = compared.h100_left_out()
    assert table.mean_error <= 0.08
    assert table.worst_error <= 0.11


def test_product_share_is_the_fitted_one():
    assert h100.fit_product_share(h100.make_steps()) == pytest.approx(
        HOPPER.product_share, abs=1e-3
    )


@pytest.mark.parametrize("name, micro_batch, chunks", [("119B", 2, 8), ("314B", 1, 6)])
def test_chunks_of_the_search_hardly_change_the_error(name, micro_batch, chunks):
    """The published table does not state chunks. The planner's search allows at most eight."""
    (step,) = [step for step in h100.make_steps() if step.model.name == name]
    config = TransformerOpParallelConfig(
        data_parallel=step.data,
        model_parallel=step.tensor,
        pipeline_stage=step.stages,
        pipeline_chunks=chunks,
        pipeline_schedule="interleaved",
        sequence_parallel=True,
        optimizer_shard=1,
        micro_batch_num=step.global_batch // (step.data * micro_batch),
    )
    cluster = Cluster(get_device("h100"), step.devices)
    planned = cost(step.model, cluster, Job(step.global_batch), config)
    assert planned.reference_seconds == pytest.approx(step.seconds, rel=0.1)


def test_steps_are_those_of_the_published_table(shared_data):
    path = shared_data / "planner" / "megatron_h100_calibration.csv"
    rows = list(csv.DictReader(path.open()))
    for row, step in zip(rows, h100.make_steps(), strict=True):
        sizes = step.model.config.num_heads, step.model.config.hidden_size, step.model.num_blocks
        assert sizes == (int(row["heads"]), int(row["hidden"]), int(row["layers"]))
        degrees = step.tensor, step.stages, step.data, step.devices, step.global_batch
        names = "tensor", "pipeline", "data", "gpus", "global_batch"
        assert degrees == tuple(int(row[name]) for name in names)
        assert step.tflops == float(row["tflops_per_gpu"])
        assert step.seconds == pytest.approx(float(row["step_seconds"]), abs=6e-3)
        assert step.model.parameters() / 1e9 == pytest.approx(float(row["params"][:-1]), rel=0.05)


def test_passes_of_this_library_match_one_h200():
    """A 355M model, 8 × 1,024 tokens. The slowdown is the mean of both measurements."""
    model = get_model(
        "gpt2_medium", vocab_size=50304, hidden_size=1024, num_heads=16, num_layers=24
    )
    device = get_device("h200")
    unfused = dataclasses.replace(device.constants, attention_share=0.0)
    for milliseconds, constants in ((H200_FUSED, device.constants), (H200_UNFUSED, unfused)):
        cluster = Cluster(dataclasses.replace(device, constants=constants), 1)
        planned = cost(model, cluster, Job(8), TransformerOpParallelConfig())
        assert planned.step_seconds == pytest.approx(milliseconds / 1e3, rel=0.12)


def test_only_this_library_leaves_attention_unfused_on_a_mesh():
    step = h100.make_steps()[1]
    layouts = step.layouts()
    library = Job(step.global_batch, "mixed_bfloat16").system()
    assert not np.any(library.fuses_attention(layouts))
    assert np.all(REFERENCE.fuses_attention(layouts))
    alone = dataclasses.replace(layouts, model=np.ones_like(layouts.model))
    assert np.all(library.fuses_attention(alone))


def test_plan_prints_both_systems(capsys):
    ask = ["plan", "--model", "gpt2-small", "--devices", "8", "--global-batch", "64", "--device"]
    assert main([*ask, "h100"]) == 0
    printed = capsys.readouterr().out
    assert " s/step  reference s/step " in printed
    assert "\nReference system: the same layout in Megatron-LM" in printed
    assert main([*ask, "v100", "--precision", "mixed_float16"]) == 0
    assert "eference" not in capsys.readouterr().out
