"""In a pipeline, every rank reads and sets the weights of all stages, in Keras' order."""

import numpy as np

from harness.tolerances import PARITY_WEIGHTS
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.stage_weights:"
LAYOUT = "pp2m2-1f1b@2x1"
TASK_NAMES = "lora", "dora", "frozen_blocks", "untrained"
RUNS = [f"{TASKS}{task}/{LAYOUT}" for task in TASK_NAMES]
LONG = RUNS[1:]


def one_process(run):
    return f"{run.split('/')[0]}/alone@1x1"


def arrays(result, name):
    return [result[key] for key in sorted(result) if key.startswith(f"{name}/")]


@parametrize_runs(RUNS, LONG, lambda run: [one_process(run)])
def test_weights_on_every_rank_match_one_process(run, rank_results):
    (expected,) = rank_results(one_process(run))
    names = {key.partition("/")[0] for key in expected if "/" in key}
    if "untrained" in run:  # `BatchNormalization` normalizes each micro-batch.
        names = {"first", "ones"}
    for rank in rank_results(run):
        assert rank["parameters"] == expected["parameters"]
        for name in names:
            pairs = zip(arrays(rank, name), arrays(expected, name), strict=True)
            for weight, value in pairs:
                np.testing.assert_allclose(weight, value, rtol=0, atol=PARITY_WEIGHTS)


@parametrize_runs(RUNS[:2] + RUNS[3:], LONG, lambda run: [one_process(run)])
def test_best_weights_are_restored(run, rank_results):
    for rank in [*rank_results(run), *rank_results(one_process(run))]:
        best, restored = arrays(rank, "best"), arrays(rank, "restored")
        assert len(best) > 10
        for weight, value in zip(restored, best, strict=True):
            np.testing.assert_array_equal(weight, value)


@parametrize_runs(RUNS[3:], LONG)
def test_assigned_weights_are_visible_on_every_rank(run, rank_results):
    first, second = rank_results(run)
    for name in ("trained", "averaged", "doubled"):
        for weight, value in zip(arrays(first, name), arrays(second, name), strict=True):
            np.testing.assert_array_equal(weight, value)
    for weight, value in zip(arrays(first, "doubled"), arrays(first, "restored"), strict=True):
        np.testing.assert_array_equal(weight, 2 * value)
