"""Promise: the seed determines the order of shuffled data, for every number of ranks."""

import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import each

TASKS = "tests.distributed.tasks.shuffled:"
RUNS = [
    f"{TASKS}{task}/{layout}"
    for task in ("shuffled", "shuffled_by_options")
    for layout in ("dp2@2x1", "mp2@2x1")
]


def alone(run):
    return f"{run.split('/')[0]}/alone@1x1"


@each(RUNS, RUNS[1:], lambda run: [alone(run)])
def test_losses_of_shuffled_data_are_those_of_one_process(run, ranks_of):
    (expected,) = ranks_of(alone(run))
    for rank in ranks_of(run):
        assert rank.keys() == expected.keys()
        for name, losses in rank.items():
            np.testing.assert_allclose(losses, expected[name], rtol=PARITY_LOSS, err_msg=name)
