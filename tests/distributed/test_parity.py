"""A job gives the losses, weights and outputs of one process, for every layout."""

import numpy as np
import pytest

from dtransformer.trainers import Trainer
from harness.compare import assert_same, differences, weights
from harness.networks import get_kind, make
from harness.runs import USED, Run
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS
from harness.training import SEARCHES, SHORT_SEARCHES, SHORT_STEPS, weights_file
from tests.distributed.parity_runs import LONG, QUICK, RUNS
from tests.shared_runs import parametrize_runs

USED_RUNS = [run for run in RUNS if USED in run]


def network_name(run):
    return Run.from_name(run).task.removesuffix(USED)


def one_process_run(run):
    """Return the run of the same network in one process."""
    network = network_name(run)
    runs = QUICK if run in QUICK else RUNS  # The quick suite skips unneeded runs.
    is_used = any(USED in other_run and network_name(other_run) == network for other_run in runs)
    return f"{network}{USED * is_used}/alone@1x1"


def merge_rank_weights(ranks, kind):
    """Return the weights of all ranks, by path. Lower ranks take precedence."""
    weights_by_rank = [weights(results, kind) for results in reversed(ranks)]
    return {
        path: weight for rank_weights in weights_by_rank for path, weight in rank_weights.items()
    }


each_run = parametrize_runs(RUNS, LONG, lambda run: [one_process_run(run)])
each_used = parametrize_runs(USED_RUNS, LONG, lambda run: [one_process_run(run)])
each_generating = parametrize_runs(
    [
        run
        for run in USED_RUNS
        if get_kind(network_name(run)) not in ("bert", "masked", "long_masked")
    ],
    LONG,
    lambda run: [one_process_run(run)],
)


@each_run
def test_losses_and_weights_match_one_process(run, rank_results):
    ranks, (expected,) = rank_results(run), rank_results(one_process_run(run))
    assert len(set(expected["losses"])) >= SHORT_STEPS  # The losses vary.
    assert merge_rank_weights(ranks, "final").keys() == weights(expected, "final").keys()
    results = {name: value for rank in reversed(ranks) for name, value in rank.items()}
    results = differences(results, expected, network_name(run))
    assert results["loss"] <= PARITY_LOSS
    assert results["weights"] <= PARITY_WEIGHTS, results["where"]


@parametrize_runs([run for run in RUNS if "moe" in run], LONG, lambda run: [one_process_run(run)])
def test_expert_assignments_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process_run(run))
    for rank in rank_results(run):
        np.testing.assert_array_equal(rank["taken"], expected["taken"])


@each_run
def test_initial_weights_do_not_depend_on_the_layout(run, rank_results):
    (expected,) = rank_results(one_process_run(run))
    assert_same(merge_rank_weights(rank_results(run), "initial"), weights(expected, "initial"))


@parametrize_runs([run for run in RUNS if Run.from_name(run).layout.ranks > 1], LONG)
def test_ranks_agree_bit_for_bit(run, rank_results):
    ranks = rank_results(run)
    common = merge_rank_weights(ranks, "final")
    for rank in ranks:
        np.testing.assert_array_equal(rank["losses"], ranks[0]["losses"])
        for path, weight in weights(rank, "final").items():
            np.testing.assert_array_equal(weight, common[path], err_msg=path)


@each_used
def test_evaluation_and_prediction_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process_run(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)


@each_generating
@pytest.mark.parametrize(
    "search",
    [
        pytest.param(search, marks=[pytest.mark.long] * (search not in SHORT_SEARCHES))
        for search in SEARCHES
    ],
)
def test_translations_match_one_process(run, search, rank_results):
    (expected,) = rank_results(one_process_run(run))
    for rank in rank_results(run):
        np.testing.assert_array_equal(rank[search], expected[search])


@each_used
def test_weights_saved_on_ranks_load_in_one_process(run, rank_results):
    trained = merge_rank_weights(rank_results(run), "final")
    model, _ = make(network_name(run))
    Trainer(model).load_weights(
        weights_file(rank_results.folder, network_name(run), Run.from_name(run).layout)
    )
    assert_same(trained, {weight.path: weight.numpy() for weight in model.weights})


@each_used
def test_weights_saved_by_one_process_load_on_ranks(run, rank_results):
    expected = weights(rank_results(one_process_run(run))[0], "final")
    for rank in rank_results(run):
        loaded = weights(rank, "loaded")
        assert loaded.keys() == weights(rank, "final").keys()
        assert_same(loaded, {path: expected[path] for path in loaded})
