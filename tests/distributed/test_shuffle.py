"""Promise: the seed determines the order of shuffled data, for every number of ranks."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS

ALONE = "tests.distributed.tasks.shuffled:shuffled/alone@1x1"
RUNS = [f"tests.distributed.tasks.shuffled:shuffled/{layout}" for layout in ("dp2@2x1", "mp2@2x1")]


@pytest.mark.parametrize("run", [pytest.param(x, marks=pytest.mark.runs(x, ALONE)) for x in RUNS])
def test_losses_of_shuffled_data_match_one_process(run, ranks_of):
    (expected,) = ranks_of(ALONE)
    for rank in ranks_of(run):
        assert rank.keys() == expected.keys()
        for name, losses in rank.items():
            np.testing.assert_allclose(losses, expected[name], rtol=PARITY_LOSS, err_msg=name)
