"""Every layout gives one process' losses with bfloat16 states and with averages, also resumed."""

import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

FLAT = (
    *("dp2@2x1+shard1", "dp2@2x1", "dp2@2x1+shard2", "dp2@2x1+shard3"),
    *("mp2@2x1+rows", "pp2m2-1f1b@2x1"),
)
LAYOUTS = {
    "rounded": FLAT,
    "overwritten": FLAT,
    "rounded_muon": ("dp2@2x1+whole2", "pp2m2-1f1b@2x1"),
}
TASKS = "tests.distributed.tasks.optimizer_states"
RUNS = [f"{TASKS}:{task}/{layout}" for task, names in LAYOUTS.items() for layout in names]
# Sums of gradients differ by rounding errors between layouts. A few moments therefore round to another
# bfloat16 number, although all layouts compare them with the same random bits.
TOLERANCES = {"rounded": 1e-4, "rounded_muon": 1e-4, "overwritten": PARITY_LOSS}


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


# trainers/test_stochastic_rounding.py tests shards and resumed runs in one process.
@parametrize_runs(RUNS, RUNS, lambda run: [one_process(run)])
def test_losses_match_one_process_and_resume_exactly(run, rank_results):
    (expected,) = rank_results(one_process(run))
    tolerance = TOLERANCES[run.split(":")[1].split("/")[0]]
    saved_step = len(expected["losses"]) // 2
    ranks = rank_results(run)
    for rank in ranks:
        np.testing.assert_array_equal(rank["resumed"], rank["losses"][saved_step:])
        np.testing.assert_allclose(rank["losses"], expected["losses"], tolerance)
        np.testing.assert_allclose(rank["evaluated"], expected["evaluated"], tolerance)
        np.testing.assert_allclose(
            rank["from_one_process"], expected["losses"][saved_step:], tolerance
        )
        planned, measured = rank["states"]
        assert planned == measured
    if "+shard" in run:
        # Biases and norms are below the threshold, so each rank stores a bit more than half.
        assert all(rank["states"][1] < 0.6 * expected["states"][1] for rank in ranks)
