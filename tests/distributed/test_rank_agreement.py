"""Ranks agree on the learning rate and on stopping, and weights that differ are an error."""

import pytest

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.rank_agreement:"
QUICK = [TASKS + run for run in ("agreed/dp2@2x1", "refused/dp2@2x1+shard3")]
LONG = [
    TASKS + run
    for run in (
        *("agreed/mp2@2x1", "agreed/dp2@2x1+shard2", "agreed/dp2@2x1+shard3"),
        *("refused/dp2@2x1", "refused/mp2@2x1"),
    )
]
SINGLE = TASKS + "agreed/alone@1x1"
_ADVICE = "Give every rank the same callbacks"


def runs_with_task(task):
    return [run for run in QUICK + LONG if f":{task}/" in run]


@parametrize_runs(runs_with_task("agreed"), LONG, lambda run: [SINGLE])
def test_all_ranks_adopt_the_learning_rate_of_rank_0(run, rank_results):
    (expected,) = rank_results(SINGLE)
    for rank in rank_results(run):
        for name in ("rates", "all stop"):
            assert rank[name]["error"] == "", name
            assert rank[name]["losses"][:3] == pytest.approx(
                expected[name]["losses"][:3], PARITY_LOSS
            )
        # Another rank may be in the next batch when one rank stops within an epoch.
        extra_steps = rank["rates"]["steps"] - expected["rates"]["steps"]
        assert extra_steps in (0, 1)
        assert rank["all stop"]["steps"] == expected["all stop"]["steps"]
    first, *others = [rank["rates"] for rank in rank_results(run)]
    for other in others:
        assert (other["steps"], other["losses"]) == (first["steps"], first["losses"])
        assert other["weights"] == pytest.approx(first["weights"], 1e-6)


@parametrize_runs(runs_with_task("agreed"), LONG)
def test_rank_0_warns_of_differing_rates_and_of_a_single_rank_that_stops(run, rank_results):
    warned = [
        {name: [text for text in fit["warnings"] if _ADVICE in text] for name, fit in rank.items()}
        for rank in rank_results(run)
    ]
    first, second = warned
    assert "Learning rates differ: rank 1 has 0.1, rank 0 has 0.05." in first["rates"][0]
    stop = first["save and stop"][0]
    assert "`stop_training` is set on rank 1 but not on rank 0. All ranks stop." in stop
    assert first["all stop"] == second["rates"] == []


@parametrize_runs(runs_with_task("agreed"), LONG)
def test_ranks_save_and_stop_together_after_the_epoch_that_one_of_them_ends(run, rank_results):
    for rank in rank_results(run):
        for name in ("stop and save", "save and stop"):
            assert (rank[name]["error"], rank[name]["steps"]) == ("", 4)


@parametrize_runs(runs_with_task("refused"), LONG)
def test_all_ranks_raise_an_error_that_names_a_rank_with_other_weights(run, rank_results):
    for rank in rank_results(run):
        error = rank["rate within an epoch"]["error"]
        assert "differ after epoch 1: rank 1 has 0.02, rank 0 has 0.1." in error
        assert "Learning rates differ after epoch" in rank["schedules"]["error"]
        if "set weights" in rank:
            error = rank["set weights"]["error"]
            assert "Weights differ after epoch 2: their norm is" in error
            assert " on rank 1 and " in error
        assert "Rank 1 trains nothing in addition" in rank["trained"]["error"]
        assert "ExponentialDecay on rank" in rank["kinds"]["error"]
