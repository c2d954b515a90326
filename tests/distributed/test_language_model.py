"""Training on token shards gives one process' losses, and resumes bit for bit."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks.language_model import STOP
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.language_model:"
LONG = [
    *(
        f"{TASKS}gpt/{layout}"
        for layout in ("dp2@2x1", "dp2mp2@2x2", "dp2@2x1+shard3", "pp2m2-1f1b@2x1")
    ),
    *(f"{TASKS}bert/{layout}" for layout in ("dp2@2x1", "mp2@1x2", "pp2m2-1f1b@2x1")),
]


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


each_run = parametrize_runs(LONG, LONG, lambda run: [one_process(run)])


@each_run
def test_losses_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)


@each_run
def test_resumed_run_continues_bit_for_bit(run, rank_results):
    for rank in (*rank_results(run), *rank_results(one_process(run))):
        np.testing.assert_array_equal(rank["resumed"], rank["losses"][STOP:])
        assert rank["same_weights"]


@pytest.mark.runs(f"{TASKS}gpt/alone@1x1")
def test_language_model_loss_decreases(rank_results):
    losses = rank_results(f"{TASKS}gpt/alone@1x1")[0]["losses"]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
