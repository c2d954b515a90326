"""Promise: a language model trained on token shards has one process' losses, and goes on bit by bit."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks.language_model import STOP
from tests.shared_runs import each

TASKS = "tests.distributed.tasks.language_model:"
LONG = [
    *(
        f"{TASKS}gpt/{layout}"
        for layout in ("dp2@2x1", "dp2mp2@2x2", "dp2@2x1+shard3", "pp2m2-1f1b@2x1")
    ),
    *(f"{TASKS}bert/{layout}" for layout in ("dp2@2x1", "mp2@1x2", "pp2m2-1f1b@2x1")),
]


def alone(run):
    return f"{run.split('/')[0]}/alone@1x1"


each_run = each(LONG, LONG, lambda run: [alone(run)])


@each_run
def test_losses_are_those_of_one_process(run, ranks_of):
    (expected,) = ranks_of(alone(run))
    for rank in ranks_of(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)


@each_run
def test_a_run_goes_on_from_any_step_bit_by_bit(run, ranks_of):
    for rank in (*ranks_of(run), *ranks_of(alone(run))):
        np.testing.assert_array_equal(rank["resumed"], rank["losses"][STOP:])
        assert rank["same_weights"]


@pytest.mark.runs(f"{TASKS}gpt/alone@1x1")
def test_it_learns(ranks_of):
    losses = ranks_of(f"{TASKS}gpt/alone@1x1")[0]["losses"]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
