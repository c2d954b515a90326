"""Promise: the planner, the reports and what is measured agree, for small jobs of every technique."""

import numpy as np
import pytest

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner import Cluster, Job, cost, from_network
from dtransformer.planner.formulas import ring_elements, sums_over_model
from dtransformer.planner.machine import cpu_device
from harness.runs import Run
from tests.distributed.tasks.planner import BATCH, LENGTH, SIZES, network
from tests.shared_runs import each

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
MEMORY = 0.10  # of what is measured, as far as it is: activations are the report's


def planned(run):
    """Return the `Cost` of a run's layout."""
    layout = Run.of(run).layout
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


@each([*REPLICAS, *MODEL, *PIPELINES, RECOMPUTED], LONG)
def test_the_fullest_rank_has_what_is_planned(run, ranks_of):
    own = planned(run).bytes_by_kind
    fullest = max(
        (results["bytes"] for results in ranks_of(run)), key=lambda row: sum(row.values())
    )
    assert sum(own[kind] for kind in KINDS.values()) == pytest.approx(
        sum(fullest.values()), rel=MEMORY
    )
    for name, kind in KINDS.items():
        assert own[kind] == pytest.approx(fullest[name], rel=MEMORY), name


@each(REPLICAS, LONG)
def test_replicas_send_what_the_theory_says(run, ranks_of):
    level = Run.of(run).layout.level
    for results in ranks_of(run):
        expected = ring_elements("all-reduce", results["parameters"], 2)
        # Level 3 gathers once more, but for tables of embeddings, whose rows are looked up.
        expected *= 1.5 if level == 3 else 1
        assert results["reduced"] == pytest.approx(expected, rel=MEMORY)


@each(MODEL, LONG)
def test_a_mesh_sums_what_the_theory_says(run, ranks_of):
    for results in ranks_of(run):
        expected = [sums_over_model(2) * STREAM] * SIZES["num_layers"]
        # With a sharded stream also the gradients of norms and biases, which are vectors.
        np.testing.assert_allclose(results["sums"], expected, rtol=0.01)


@each(PIPELINES, LONG)
def test_stages_send_what_the_theory_says(run, ranks_of):
    """Each sends a stream for every micro-batch: activations forward, gradients backward."""
    sent = [results["sent"] for results in ranks_of(run)]
    np.testing.assert_allclose(sent, STREAM, rtol=MEMORY)
