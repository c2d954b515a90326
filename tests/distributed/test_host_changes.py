"""Promise: what one rank's callbacks change is the same on all ranks, or said in one line."""

import pytest

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import each

TASKS = "tests.distributed.tasks.host_changes:"
QUICK = [TASKS + run for run in ("kept/dp2@2x1", "refused/dp2@2x1+shard3")]
LONG = [
    TASKS + run
    for run in (
        *("kept/mp2@2x1", "kept/dp2@2x1+shard2", "kept/dp2@2x1+shard3"),
        *("refused/dp2@2x1", "refused/mp2@2x1"),
    )
]
ALONE = TASKS + "kept/alone@1x1"


def those_of(task):
    return [run for run in QUICK + LONG if f":{task}/" in run]


@each(those_of("kept"), LONG, lambda run: [ALONE])
def test_all_ranks_have_what_keras_has_where_rank_0_changes_it(run, ranks_of):
    (expected,) = ranks_of(ALONE)
    for rank in ranks_of(run):
        for name in ("apart", "all stop"):
            wanted = expected[name]
            assert rank[name]["error"] == "", name
            # Another rank may be in the next batch when one stops within an epoch.
            assert wanted["steps"] <= rank[name]["steps"] <= wanted["steps"] + (name == "apart")
            losses = wanted["losses"][:3], rank[name]["losses"][:3]
            assert losses[1] == pytest.approx(losses[0], PARITY_LOSS), name
        assert rank["all stop"]["weights"] == pytest.approx(expected["all stop"]["weights"], 1e-4)
    first, *others = [rank["apart"] for rank in ranks_of(run)]
    for other in others:
        assert (other["steps"], other["losses"]) == (first["steps"], first["losses"])
        assert other["weights"] == pytest.approx(first["weights"], 1e-6)


@each(those_of("kept"), LONG)
def test_what_one_rank_alone_changes_is_told_once(run, ranks_of):
    first, second = ranks_of(run)
    told = first["apart"]["told"]
    assert len(told) == 5 and all("give every rank the same callbacks" in one for one in told), told
    assert "the learning rate of rank 1 is 0.9, and" in told[1]
    assert "the sum over the weights of rank 1 is" in told[2]
    assert any("stop_training is set on rank 1 alone" in one for one in told[3:])
    assert first["all stop"]["told"] == second["apart"]["told"] == []


@each(those_of("kept"), LONG)
def test_ranks_save_and_stop_together_after_the_epoch_that_one_of_them_ends(run, ranks_of):
    for rank in ranks_of(run):
        for name in ("stop and save", "save and stop"):
            assert (rank[name]["error"], rank[name]["steps"]) == ("", 4)


@each(those_of("refused"), LONG)
def test_ranks_that_train_apart_say_so_on_every_rank(run, ranks_of):
    for rank in ranks_of(run):
        assert "rank 1 is 0.02" in rank["rate within an epoch"]["error"]
        assert "after epoch 1" in rank["rate within an epoch"]["error"]
        assert "the learning rate of rank 1 is" in rank["schedules"]["error"]
        assert "rank 1 trains none of them, and" in rank["trained"]["error"]
        if "weights" in rank:
            assert "sharded weights that were set on rank 1 is" in rank["weights"]["error"]
