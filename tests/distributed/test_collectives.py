"""Promise: collectives give NumPy's numbers, the right gradients, and errors on every rank."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.distributed.collective_checks import CHECKS
from tests.distributed.launch import launch, needs_horovod
from tests.tolerances import PARITY_LOSS

pytestmark = needs_horovod

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/hybrid_parallel.py"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What every rank found: one launch for each number of ranks."""

    @functools.cache
    def run(num_ranks):
        folder = tmp_path_factory.mktemp("ranks")
        program = ["-m", "tests.distributed.collective_checks", folder]
        try:
            code, output = launch(num_ranks, program, timeout=240)
        except pytest.fail.Exception as error:  # so that one launch that hangs is enough
            return str(error)
        files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
        return output[-8000:] if code else [json.loads(file.read_text()) for file in files]

    def found(num_ranks, name):
        ranks = run(num_ranks)
        assert not isinstance(ranks, str), ranks
        return [rank[name] for rank in ranks]

    return found


@pytest.mark.parametrize(
    "num_ranks, name",
    [(size, name) for size in (2, 3, 4) for name, (sizes, _) in CHECKS.items() if size in sizes],
)
def test_check(job, num_ranks, name):
    failures = [
        f"rank {rank}: {text}" for rank, texts in enumerate(job(num_ranks, name)) for text in texts
    ]
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def losses_alone():
    output = subprocess.check_output([sys.executable, EXAMPLE], text=True, timeout=120)
    return [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", output)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hybrid_parallel_has_the_losses_of_one_process(job, num_ranks, losses_alone):
    assert len(losses_alone) == 10 and losses_alone[-1] < losses_alone[0] / 2
    for losses in job(num_ranks, "hybrid_losses"):
        np.testing.assert_allclose(losses, losses_alone, rtol=PARITY_LOSS)
