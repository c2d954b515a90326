"""Promise: recompute of any Keras layer does not change losses on any layout.

Layers have dropout, whose masks must be the same in both computations.
tests/parallel/keras_layers/test_recompute.py counts stored activations.
"""

import importlib.util

import numpy as np
import pytest

from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.recompute:"
LAYOUTS = "alone@1x1 m2@1x1 dp2@2x1 dp2@2x1+shard3 mp2@1x2 pp2m2-1f1b@2x1".split()
KINDS = ["dense", "attention", "subclass"]
QUICK_RUNS = [f"{TASKS}quick/{layout}" for layout in ("alone@1x1", "mp2@1x2")]
RUNS = [f"{TASKS}{kind}/{layout}" for kind in (*KINDS, "scopes") for layout in LAYOUTS]
HUB_RUNS = [f"{TASKS}keras_hub/{layout}" for layout in LAYOUTS]
TOLERANCE = 2e-6  # Sums of several gradients may have another order.


def check_run(run, rank_results):
    for rank in rank_results(run):
        stored = rank.pop("stored")
        assert len(set(stored["losses"])) == len(stored["losses"])
        for mode, results in rank.items():
            np.testing.assert_allclose(results["losses"], stored["losses"], TOLERANCE, err_msg=mode)
            np.testing.assert_allclose(results["weights"], stored["weights"], TOLERANCE)


@parametrize_runs(QUICK_RUNS + RUNS, RUNS)
def test_recomputed_layers_have_equal_losses(run, rank_results):
    check_run(run, rank_results)


@pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None,
    reason="KerasHub is not installed: pip install keras-hub",
)
@parametrize_runs(HUB_RUNS, HUB_RUNS)
def test_recomputed_keras_hub_blocks_have_equal_losses(run, rank_results):
    check_run(run, rank_results)
