"""Promise: a sharded optimizer gives the numbers of one process, and takes its share only."""

import numpy as np
import pytest

from tests.distributed import layouts
from tests.distributed.launch import needs_horovod
from tests.distributed.layouts import parse
from tests.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS

# One launch for each number of ranks. The whole grid: python benchmarks/parity.py
RUNS = """
    adamw/dp2@2x1+shard1    adamw/dp2@2x1+shard2    adamw/dp2@2x1+shard3
    sgd/dp2@2x1+shard2      lion/dp2@2x1+shard1     tied/dp2@2x1+shard3
    adamw/dp2mp2@2x2+shard1 sgd/dp2mp2@2x2+shard3
    adamw/dp4@4x1+shard3    adamw/dp4mp2@4x2+shard3
""".split()
USED = "tied/dp2@2x1+shard3"
WITHOUT_MESH = [run for run in RUNS if "mp" not in run]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gives, by network."""
    results = {}
    for network in {parse(run)[0] for run in RUNS}:
        trainer, results[network] = layouts.train(network)
        if network == parse(USED)[0]:
            results[network].update(layouts.use(trainer, network, folder, layouts.ALONE))
    return results


@pytest.fixture(scope="module")
def ranks_of(folder, alone):
    """A function of a run that returns what each of its ranks gives."""
    return layouts.reader(folder, RUNS, [USED])


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_losses_and_weights_are_those_of_one_process(run, ranks_of, alone):
    network = parse(run)[0]
    found = layouts.differences(ranks_of(run)[0], alone[network], network)
    assert found["loss"] <= PARITY_LOSS
    assert found["weights"] <= PARITY_WEIGHTS, found["where"]


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_ranks_agree_to_the_last_bit(run, ranks_of):
    first, *others = ranks_of(run)
    for other in others:
        np.testing.assert_array_equal(other["losses"], first["losses"])
        for path, weight in layouts.weights(first, "final").items():
            np.testing.assert_array_equal(layouts.weights(other, "final")[path], weight)


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_a_rank_has_what_is_planned(run, ranks_of):
    results = ranks_of(run)[0]
    np.testing.assert_array_equal(results["measured"], results["planned"])


@needs_horovod
@pytest.mark.parametrize("run", WITHOUT_MESH)
def test_a_rank_has_its_share_of_the_memory(run, ranks_of):
    network, layout = parse(run)
    results = ranks_of(run)[0]
    sizes = [weight.size for weight in layouts.weights(results, "final").values()]
    all_of_it = 4 * sum(sizes)
    # Weights of less than 1 KB are not cut.
    share = 4 * sum(size if size < 256 else size / layout.data for size in sizes)
    states = 2 if network in ("adamw", "tied") else 1
    expected = [
        share if layout.level == 3 else all_of_it,
        share if layout.level >= 2 else all_of_it,
        states * share,
    ]
    np.testing.assert_allclose(results["measured"], expected, rtol=0.02)
    assert share < 1.3 * all_of_it / layout.data


@needs_horovod
@pytest.mark.parametrize("run", WITHOUT_MESH)
def test_a_rank_sends_what_the_theory_says(run, ranks_of, alone):
    network, layout = parse(run)
    entries = alone[network]["bytes"] / 4
    times = 3 if layout.level == 3 else 2
    sent = ranks_of(run)[0]["sent"] / (1 - 1 / layout.data)
    tables = entries if layout.level == 3 else 0
    assert sent <= 1.1 * times * entries
    assert sent >= times * entries - tables


@needs_horovod
def test_slices_of_weights_serve_in_every_other_way(ranks_of, alone):
    expected = alone[parse(USED)[0]]
    for rank in ranks_of(USED):
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)
        for kind in ("greedy", "beam"):
            np.testing.assert_array_equal(rank[kind], expected[kind])
        for path, weight in layouts.weights(expected, "final").items():
            np.testing.assert_array_equal(layouts.weights(rank, "loaded")[path], weight)
