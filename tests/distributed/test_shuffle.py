"""The seed determines the order of shuffled data, for every number of ranks."""

import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.shuffled:"
RUNS = [
    f"{TASKS}{task}/{layout}"
    for task in ("shuffled", "shuffled_by_options")
    for layout in ("dp2@2x1", "mp2@2x1")
]


def one_process_run(run):
    return f"{run.split('/')[0]}/alone@1x1"


@parametrize_runs(RUNS, RUNS[1:], lambda run: [one_process_run(run)])
def test_losses_of_shuffled_data_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process_run(run))
    for rank in rank_results(run):
        assert rank.keys() == expected.keys()
        for name, losses in rank.items():
            np.testing.assert_allclose(losses, expected[name], rtol=PARITY_LOSS, err_msg=name)
