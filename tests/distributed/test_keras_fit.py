"""On every layout `fit`, `evaluate` and `predict` give the results of plain Keras."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOGITS, PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks."
QUICK = {
    "keras_fit:a_mask": ("mp2@2x1",),
    "keras_fit:keeps": ("dp2@2x1",),
    "keras_fit:tokens": ("pp2m2-1f1b@2x1",),
}
IN_TEST_ALL = {
    "keras_options:data": ("dp2@2x1", "dp2@2x1+shard2", "mp2@2x1", "pp2m2-1f1b@2x1"),
    "keras_options:averages": (
        *("dp2@2x1", "dp2@2x1+shard2", "dp2@2x1+shard3", "dp2mp2@2x2+whole1"),
        *("mp2@2x1", "pp2m2-1f1b@2x1"),
    ),
    "keras_options:constraint": ("dp2@2x1+shard2", "dp2@2x1+whole2", "dp2mp2@2x2+whole1"),
    "keras_options:a_loss_that_is_nan": ("dp2@2x1+shard2", "mp2@2x1", "pp2m2-1f1b@2x1"),
    "keras_fit:added": ("dp2@2x1+shard2", "dp2@2x1", "mp2@1x2", "mp2@2x1", "dp2mp2@2x2"),
    "keras_fit:first_calls": ("mp2@1x2", "dp2@2x1+shard2", "pp2m2-1f1b@2x1"),
    "keras_fit:keeps": ("pp2m2-1f1b@2x1",),
    "keras_fit:several_outputs": ("dp2@2x1+shard2", "dp2@2x1", "mp2@2x1", "pp2m2-1f1b@2x1"),
    "keras_fit:a_mask": ("dp2@2x1", "dp2@2x1+shard2", "dp2@2x1+shard3", "pp2m2-1f1b@2x1"),
    "keras_fit:tokens": ("dp2@2x1", "mp2@2x1", "dp2mp2@2x2", "dp2@2x1+shard2"),
    "keras_fit:callbacks": (
        "mp2@1x2",
        "mp2@2x1",
        "dp2@2x1",
        "dp2@2x1+shard2",
        "dp2@2x1+shard3",
        "pp2m2-1f1b@2x1",
    ),
    "keras_fit:shared_by_hand": ("mp2@1x2", "mp2@2x1", "dp2@2x1", "dp2@2x1+shard2"),
    "keras_fit:between": ("mp2@1x2", "mp2@2x1", "dp2@2x1", "dp2@2x1+shard2", "pp2m2-1f1b@2x1"),
}
LONG = [f"{TASKS}{task}/{layout}" for task, names in IN_TEST_ALL.items() for layout in names]
RUNS = [f"{TASKS}{task}/{layout}" for task, names in QUICK.items() for layout in names] + LONG
# Keras' logged losses of single outputs ignore that the last batch has fewer rows.
OUTPUT_LOSSES = {"tag_loss", "value_loss"}


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_history_and_outputs_match_keras(run, rank_results):
    (expected,) = rank_results(one_process(run))
    for rank in rank_results(run):
        for kind in ("history", "evaluation"):
            for name in set(expected[kind]) - (OUTPUT_LOSSES):
                assert rank[kind][name] == pytest.approx(expected[kind][name], PARITY_LOSS), name
        if "log_folders" in rank:
            rank_folders = [f"rank_{rank_index}" for rank_index in range(1, len(rank_results(run)))]
            assert rank["log_folders"] == [*rank_folders, "train"]
        if "keeps" in run:
            assert rank["begun"] == expected["begun"]
            assert rank["with_calls"] == pytest.approx(expected["with_calls"], PARITY_LOSS)
        for name in (name for name in expected if name.startswith("outputs/")):
            np.testing.assert_allclose(rank[name], expected[name], atol=PARITY_LOGITS)
