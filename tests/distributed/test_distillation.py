"""A student on several ranks has the losses of one process, with its teacher in the same layout.

tests/trainers/test_distillation.py is the quick test.
"""

import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.distillation:"
LAYOUTS = "dp2@2x1 dp2@2x1+shard3 mp2@1x2 pp2m2-1f1b@2x1".split()
LONG = [f"{TASKS}forward_kl/{layout}" for layout in LAYOUTS]
LONG.append(f"{TASKS}reverse_kl/dp2mp2@2x2+rows")


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


@parametrize_runs(LONG, LONG, lambda run: [one_process(run)])
def test_losses_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
        if "pp" in run:  # Stages send the teacher's activations, but no gradients of them.
            assert (rank["sent"], rank["back"]) == (1, 0)
