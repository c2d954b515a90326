"""Promise: with a sharded optimizer a rank has its share only, and sends what the theory says."""

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
def test_a_rank_has_what_is_planned(run, ranks_of):
    for results in ranks_of(run):
        np.testing.assert_array_equal(results["measured"], results["planned"])


@each(WHOLE, LONG)
def test_whole_weights_are_spread_evenly(run, ranks_of):
    states = [results["measured"][2] for results in ranks_of(run)]
    assert max(states) <= 1.15 * np.mean(states)


@each(FLAT, LONG)
def test_a_rank_has_its_share_of_the_memory(run, ranks_of):
    network, layout = network_of(run), Run.of(run).layout
    results = ranks_of(run)[0]
    sizes = [weight.size for weight in weights(results, "final").values()]
    all_of_it = 4 * sum(sizes)
    # Weights of less than 1 KB are not sharded.
    share = 4 * sum(size if size < 256 else size / layout.data for size in sizes)
    states = 1 if network in ("sgd", "lion") else 2
    expected = [
        share if layout.level == 3 else all_of_it,
        share if layout.level >= 2 else all_of_it,
        states * share,
    ]
    np.testing.assert_allclose(results["measured"], expected, rtol=0.02)
    assert share < 1.3 * all_of_it / layout.data


@each(WITHOUT_MESH, LONG, lambda run: [alone(run)])
def test_a_rank_sends_what_the_theory_says(run, ranks_of):
    layout = Run.of(run).layout
    elements = ranks_of(alone(run))[0]["bytes"] / 4
    times = 3 if layout.level == 3 else 2
    sent = np.mean([results["sent"] for results in ranks_of(run)]) / (1 - 1 / layout.data)
    tables = elements if layout.level == 3 else 0
    assert sent <= 1.1 * times * elements
    assert (
        sent >= 0.99 * times * elements - tables
    )  # of BART a bias that is not trained is not sent
