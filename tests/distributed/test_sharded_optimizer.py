"""With a sharded optimizer, memory and communication of a rank match the formulas."""

import numpy as np

from harness.compare import weights
from harness.runs import Run
from tests.distributed.parity_runs import LONG, RUNS
from tests.distributed.test_parity import network_name, one_process_run
from tests.shared_runs import parametrize_runs


def is_without_mesh(layout):
    return layout.model == layout.context == layout.experts == 1


SHARDED = [run for run in RUNS if Run.from_name(run).layout.level]
WITHOUT_MESH = [
    run
    for run in SHARDED
    if is_without_mesh(Run.from_name(run).layout)
    and not any(word in network_name(run) for word in ("lora", "frozen"))
]
FLAT = [run for run in WITHOUT_MESH if Run.from_name(run).layout.partition == "flat"]
WHOLE = [
    run
    for run in WITHOUT_MESH
    if Run.from_name(run).layout.partition == "whole" and Run.from_name(run).layout.stages == 1
]
PIPELINES = [run for run in FLAT if Run.from_name(run).layout.stages > 1]
WITHOUT_STAGES = [run for run in WITHOUT_MESH if Run.from_name(run).layout.stages == 1]


@parametrize_runs(SHARDED, LONG)
def test_measured_memory_equals_planned_memory(run, rank_results):
    for results in rank_results(run):
        np.testing.assert_array_equal(results["measured"], results["planned"])


@parametrize_runs(WHOLE, LONG)
def test_unsharded_states_are_spread_evenly(run, rank_results):
    states = [results["measured"][2] for results in rank_results(run)]
    assert max(states) <= 1.15 * np.mean(states)


@parametrize_runs(FLAT, LONG)
def test_rank_has_its_fraction_of_the_memory(run, rank_results):
    network, layout = network_name(run), Run.from_name(run).layout
    accumulates_full = layout.micro_batches > 1 and not layout.reduces
    for results in rank_results(run):
        sizes = [weight.size for weight in weights(results, "final").values()]
        total_bytes = 4 * sum(sizes)
        # Weights below 1 KB are not sharded.
        shard_bytes = 4 * sum(size if size < 256 else size / layout.data for size in sizes)
        states = 1 if network in ("sgd", "lion") else 2
        shards_gradients = layout.level == 3 or (layout.level == 2 and not accumulates_full)
        expected = [
            shard_bytes if layout.level == 3 else total_bytes,
            shard_bytes if shards_gradients else total_bytes,
            states * shard_bytes,
        ]
        np.testing.assert_allclose(results["measured"], expected, rtol=0.02)
        assert shard_bytes < 1.3 * total_bytes / layout.data


@parametrize_runs(PIPELINES, LONG)
def test_stage_sends_the_elements_of_the_formula(run, rank_results):
    """In a pipeline of m micro-batches, S sharded and R replicated elements on d data ranks.

    In units of (d - 1) / d, a reduction or an all-gather of the shards sends S elements, and an
    all-reduce 2R. Level 3 all-gathers weights twice per micro-batch, but tables for lookups once.
    """
    layout = Run.from_name(run).layout
    m = layout.micro_batches
    for rank, results in enumerate(rank_results(run)):
        stage = rank * layout.stages // layout.ranks
        sizes = {path: weight.size for path, weight in weights(results, "final").items()}
        sharded = sum(size for size in sizes.values() if size >= 256)
        replicated = sum(size for size in sizes.values() if size < 256)
        num_reductions = m if layout.reduces else 1
        if layout.level == 3:
            tables = [size for path, size in sizes.items() if path.endswith("table")]
            looked_up = 0 if stage else sum(size for size in tables if size >= 256)
            elements = m * (3 * sharded - looked_up) + num_reductions * 2 * replicated
        else:
            elements = num_reductions * (sharded + 2 * replicated) + sharded
        # Shards are padded, and the norm, the loss and the token counts are also summed.
        padding_and_sums = 40 + m * len(sizes)
        expected = elements * (1 - 1 / layout.data)
        assert expected <= results["sent"] <= expected + padding_and_sums


@parametrize_runs(WITHOUT_STAGES, LONG, lambda run: [one_process_run(run)])
def test_rank_sends_the_expected_number_of_elements(run, rank_results):
    layout = Run.from_name(run).layout
    elements = rank_results(one_process_run(run))[0]["bytes"] / 4
    m = layout.micro_batches
    factor = 2
    if layout.level == 3:
        factor = 3 * m
    elif layout.reduces:
        factor = m + 1
    sent = np.mean([results["sent"] for results in rank_results(run)]) / (1 - 1 / layout.data)
    tables = m * elements if layout.level == 3 else 0
    assert sent <= 1.1 * factor * elements
    assert (
        sent >= 0.99 * factor * elements - tables
    )  # BART has a bias that is not trained, and therefore not sent.
