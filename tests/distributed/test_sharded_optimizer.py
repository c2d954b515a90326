"""Promise: with a sharded optimizer, memory and communication of a rank match the formulas."""

import numpy as np

from harness.compare import weights
from harness.runs import Run
from tests.distributed.parity_runs import LONG, RUNS
from tests.distributed.test_parity import alone, network_of
from tests.shared_runs import each


def is_without_mesh(layout):
    return layout.model == layout.context == layout.experts == 1


SHARDED = [run for run in RUNS if Run.of(run).layout.level and Run.of(run).layout.stages == 1]
WITHOUT_MESH = [
    run
    for run in SHARDED
    if is_without_mesh(Run.of(run).layout)
    and not any(word in network_of(run) for word in ("lora", "frozen"))
]
FLAT = [run for run in WITHOUT_MESH if Run.of(run).layout.partition == "flat"]
WHOLE = [run for run in WITHOUT_MESH if Run.of(run).layout.partition == "whole"]


@each(SHARDED, LONG)
def test_measured_memory_equals_planned_memory(run, ranks_of):
    for results in ranks_of(run):
        np.testing.assert_array_equal(results["measured"], results["planned"])


@each(WHOLE, LONG)
def test_unsharded_states_are_spread_evenly(run, ranks_of):
    states = [results["measured"][2] for results in ranks_of(run)]
    assert max(states) <= 1.15 * np.mean(states)


@each(FLAT, LONG)
def test_rank_has_its_fraction_of_the_memory(run, ranks_of):
    network, layout = network_of(run), Run.of(run).layout
    results = ranks_of(run)[0]
    sizes = [weight.size for weight in weights(results, "final").values()]
    total_bytes = 4 * sum(sizes)
    # Weights below 1 KB are not sharded.
    shard_bytes = 4 * sum(size if size < 256 else size / layout.data for size in sizes)
    states = 1 if network in ("sgd", "lion") else 2
    expected = [
        shard_bytes if layout.level == 3 else total_bytes,
        shard_bytes if layout.level >= 2 else total_bytes,
        states * shard_bytes,
    ]
    np.testing.assert_allclose(results["measured"], expected, rtol=0.02)
    assert shard_bytes < 1.3 * total_bytes / layout.data


@each(WITHOUT_MESH, LONG, lambda run: [alone(run)])
def test_rank_sends_the_expected_number_of_elements(run, ranks_of):
    layout = Run.of(run).layout
    elements = ranks_of(alone(run))[0]["bytes"] / 4
    factor = 3 if layout.level == 3 else 2
    sent = np.mean([results["sent"] for results in ranks_of(run)]) / (1 - 1 / layout.data)
    tables = elements if layout.level == 3 else 0
    assert sent <= 1.1 * factor * elements
    assert (
        sent >= 0.99 * factor * elements - tables
    )  # BART has a bias that is not trained, and therefore not sent.
