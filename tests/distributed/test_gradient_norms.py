"""Promise: the gradient norms of layers equal the norms of one process on every layout."""

import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.shared_runs import parametrize_runs

TASK = "tests.distributed.tasks.gradient_norms:norms"
ONE_PROCESS = f"{TASK}/alone@1x1"
QUICK_RUNS = [f"{TASK}/{layout}" for layout in ("mp2@1x2", "pp2m2-1f1b@2x1")]
LAYOUTS = """
    dp2@2x1  dp2@2x1+shard1  dp2@2x1+shard2  dp2@2x1+shard3  dp2@2x1+whole2  dp2m2@2x1+shard2+reduce
    mp2@2x1+rows  dp2mp2@2x2+shard2  pp2m4-interleaved2@2x1  dp2pp2m2-1f1b@4x1+shard3
""".split()
LONG_RUNS = [f"{TASK}/{layout}" for layout in LAYOUTS]
NAMES = ("embedding", "positions", "blocks/final_norm", *(f"blocks/block_{i}" for i in range(4)))


@parametrize_runs(QUICK_RUNS + LONG_RUNS, LONG_RUNS, lambda run: [ONE_PROCESS])
def test_norms_of_layers_match_one_process(run, rank_results):
    (expected,) = rank_results(ONE_PROCESS)
    assert set(expected) == {"gradient_norm", *(f"gradient_norm/{name}" for name in NAMES)}
    for rank in rank_results(run):
        assert set(rank) == set(expected)
        for name, norms in expected.items():
            np.testing.assert_allclose(rank[name], norms, rtol=PARITY_LOSS, err_msg=name)
        layers = [rank[f"gradient_norm/{name}"] for name in NAMES]
        np.testing.assert_allclose(
            np.square(layers).sum(0), np.square(rank["gradient_norm"]), rtol=PARITY_LOSS
        )
