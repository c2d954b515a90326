"""Collectives give NumPy's numbers, the right gradients, and errors on every rank."""

import numpy as np
import pytest

from harness.tolerances import PARITY_LOSS
from tests.distributed.tasks.collectives import EXAMPLES
from tests.distributed.tasks.collectives.checks import CHECKS, is_quick
from tests.shared_runs import parametrize_runs

TASKS = "tests.distributed.tasks.collectives:"
EXAMPLE_LAYOUTS = "alone@1x1", "dp2@2x1"


def checks(num_ranks):
    return f"{TASKS}checks/dp{num_ranks}@{num_ranks}x1"


@pytest.mark.parametrize(
    "num_ranks, name",
    [
        pytest.param(
            *(size, name),
            marks=[
                pytest.mark.runs(checks(size)),
                *[pytest.mark.long] * (not is_quick(name, size)),
            ],
        )
        for size in (2, 3, 4)
        for name, (sizes, _) in CHECKS.items()
        if size in sizes
    ],
)
def test_collective_check_passes_on_every_rank(num_ranks, name, rank_results):
    failures = [
        f"rank {rank}: {text}"
        for rank, results in enumerate(rank_results(checks(num_ranks)))
        for text in results[name]
    ]
    assert not failures, "\n".join(failures)


ALONE = f"{TASKS}hybrid_example/alone@1x1"


HYBRID = [f"{TASKS}hybrid_example/dp2@2x1", f"{TASKS}hybrid_example/dp4@4x1"]


@parametrize_runs(HYBRID, HYBRID[1:], lambda run: [ALONE])
def test_hybrid_parallel_losses_match_one_process(run, rank_results):
    expected = rank_results(ALONE)[0]["losses"]
    assert len(expected) == 10 and expected[-1] < expected[0] / 2
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected, rtol=PARITY_LOSS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.runs(*(f"{TASKS}{name}/{x}" for x in EXAMPLE_LAYOUTS)))
        for name in EXAMPLES
    ],
)
def test_examples_of_collectives_match_one_process(name, rank_results):
    (expected,), ranks = (rank_results(f"{TASKS}{name}/{layout}") for layout in EXAMPLE_LAYOUTS)
    assert len(expected["losses"]) == 10
    assert expected["losses"][-1] < expected["losses"][0] * 0.6
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=PARITY_LOSS)
