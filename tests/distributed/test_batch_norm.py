"""Promise: `BatchNormalization(synchronized=True)` has the statistics of one process on every layout.

With micro-batches, both have the statistics of each micro-batch.
"""

import numpy as np

from harness.runs import Run
from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.batch_norm:"
QUICK_RUNS = [f"{TASKS}resnet_quick/dp2m2@2x1"]
LAYOUTS = """
    dp2@2x1  dp2@2x1+shard3  dp2m2@2x1  dp2@1x2  dp2m2@1x2  m2@1x1
    pp2m2-1f1b@2x1  pp2m4-interleaved2@2x1  dp2pp2m2-1f1b@4x1  dp2pp2m2-1f1b@2x2
""".split()
LONG_RUNS = [f"{TASKS}resnet/{layout}" for layout in LAYOUTS]
LONG_RUNS += [f"{TASKS}{name}/dp2@2x1" for name in ("masked", "channels_first")]


def one_process(run):
    """Return the run of one process with the same micro-batches."""
    layout = Run.from_name(run).layout
    micro_batches = f"m{layout.micro_batches}" if layout.micro_batches > 1 else "alone"
    return f"{run.split('/')[0]}/{micro_batches}@1x1"


@parametrize_runs(QUICK_RUNS + LONG_RUNS, LONG_RUNS, lambda run: [one_process(run)])
def test_losses_and_moving_statistics_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        for name in (name for name in expected if name.startswith("weights/")):
            np.testing.assert_allclose(
                rank[name], expected[name], rtol=PARITY_LOSS, atol=PARITY_LOSS, err_msg=name
            )
