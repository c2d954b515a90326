"""With model parallelism, a rank holds only its shards of the weights."""

import re

from harness.compare import weights
from harness.runs import Run
from tests.shared_runs import parametrize_runs

RUNS = """
    causal.used/mp2m2-interleaved2@2x1+rows+sp+recompute
    sgd/dp2mp2-interleaved2@2x2+rows+sp+shard1+recompute
    tied.used/mp2m2@2x1+rows+sp+recompute  untied/dp2mp2@2x2+rows+sp+shard1
    sgd/mp4@2x2+rows  tied.used/mp2@2x1+rows+sp  tied/dp2mp2@4x1+rows+sp  untied/mp2@2x1
    untied/dp2mp2@4x1+rows
""".split()
LONG = RUNS[2:]
# Paths of sharded weights, without embedding tables.
SHARDED = re.compile(
    r"(query|key|value|mapping)_(kernel|bias)|(output|projection)_kernel|head/(kernel|bias)"
)


def one_process(run):
    """Return the one-process run of the same network; runs with ".used" load its weights."""
    return f"{run.split('/')[0]}/alone@1x1"


@parametrize_runs(RUNS, LONG, reads=lambda run: [one_process(run)] * (".used" in run))
def test_rank_stores_only_its_shards(run, rank_results):
    layout = Run.from_name(run).layout
    shards_of_a_rank = min(layout.devices, layout.model)
    for rank in rank_results(run):
        sharded, replicated = 0, 0
        for path, weight in weights(rank, "final").items():
            if SHARDED.search(path) or (layout.rows and path.endswith("embedding/table")):
                sharded += weight.nbytes
            else:
                replicated += weight.nbytes
        assert rank["bytes"] == sharded * shards_of_a_rank // layout.model + replicated
