"""Planner, reports and measurements agree for small jobs with every technique."""

import numpy as np
import pytest

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner import Cluster, Job, cost, from_network
from dtransformer.planner.formulas import ring_elements, sums_over_model
from dtransformer.planner.machine import cpu_device
from harness.runs import Run
from tests.distributed.tasks.planner import BATCH, LENGTH, SIZES, network
from tests.shared_runs import parametrize_runs

MODULE = "tests.distributed.tasks.planner"
REPLICAS = [
    f"{MODULE}:kept_and_sent/dp2@2x1{level}" for level in ("", "+shard1", "+shard2", "+shard3")
]
RECOMPUTED = f"{MODULE}:recomputed/dp2@2x1"
MODEL = [f"{MODULE}:kept_and_sent/mp2@2x1{options}" for options in ("+rows", "+rows+sp")]
PIPELINES = [f"{MODULE}:kept_and_sent/pp2m4-{schedule}@2x1" for schedule in ("1f1b", "gpipe")]
LONG = [*REPLICAS, *MODEL, PIPELINES[1], RECOMPUTED]
KINDS = {"weights": "weights", "gradients": "gradients", "optimizer states": "states"}
KINDS |= {"activations": "activations"}
STREAM = BATCH * LENGTH * SIZES["hidden_size"]
MEMORY = 0.10  # Relative to measured values; for activations, to the values of the report.


def planned(run):
    """Return the planner's `Cost` of a run."""
    layout = Run.from_name(run).layout
    config = TransformerOpParallelConfig(
        data_parallel=layout.data,
        model_parallel=layout.model,
        vocab_emb_dp=not layout.rows,
        sequence_parallel=layout.sequence,
        optimizer_shard=layout.level,
        pipeline_stage=layout.stages,
        micro_batch_num=layout.micro_batches,
        pipeline_schedule=layout.schedule,
        recompute="recomputed" in run,
    )
    cluster = Cluster(cpu_device(2, 16, 2), 2)
    return cost(from_network(network()), cluster, Job(BATCH, "float32", "adam"), config)


@parametrize_runs([*REPLICAS, *MODEL, *PIPELINES, RECOMPUTED], LONG)
def test_planned_memory_matches_the_fullest_rank(run, rank_results):
    planned_bytes = planned(run).bytes_by_kind
    fullest = max(
        (results["bytes"] for results in rank_results(run)), key=lambda row: sum(row.values())
    )
    assert sum(planned_bytes[kind] for kind in KINDS.values()) == pytest.approx(
        sum(fullest.values()), rel=MEMORY
    )
    for name, kind in KINDS.items():
        assert planned_bytes[kind] == pytest.approx(fullest[name], rel=MEMORY), name


@parametrize_runs(REPLICAS, LONG)
def test_replicas_send_the_planned_number_of_elements(run, rank_results):
    level = Run.from_name(run).layout.level
    for results in rank_results(run):
        expected = ring_elements("all-reduce", results["parameters"], 2)
        # Level 3 has one more all-gather, except for embedding tables: it sends looked-up rows.
        expected *= 1.5 if level == 3 else 1
        assert results["reduced"] == pytest.approx(expected, rel=MEMORY)


@parametrize_runs(MODEL, LONG)
def test_mesh_reduces_the_planned_number_of_elements(run, rank_results):
    for results in rank_results(run):
        expected = [sums_over_model(2) * STREAM] * SIZES["num_layers"]
        # A sharded stream also reduces the small gradients of norms and biases.
        np.testing.assert_allclose(results["sums"], expected, rtol=0.01)


@parametrize_runs(PIPELINES, LONG)
def test_stages_send_the_planned_number_of_elements(run, rank_results):
    """Each stage sends activations or gradients of all micro-batches."""
    sent = [results["sent"] for results in rank_results(run)]
    np.testing.assert_allclose(sent, STREAM, rtol=MEMORY)
