"""Promise: with model parallelism a rank holds its shards of the weights only."""

import re

from harness.compare import weights
from harness.runs import Run
from tests.shared_runs import each

RUNS = """
    causal.used/mp2m2-interleaved2@2x1+rows+sp+recompute
    sgd/dp2mp2-interleaved2@2x2+rows+sp+shard1+recompute
    tied.used/mp2m2@2x1+rows+sp+recompute  untied/dp2mp2@2x2+rows+sp+shard1
    sgd/mp4@2x2+rows  tied.used/mp2@2x1+rows+sp  tied/dp2mp2@4x1+rows+sp  untied/mp2@2x1
    untied/dp2mp2@4x1+rows
""".split()
LONG = RUNS[2:]
# The weights of which a rank holds a shard, besides tables.
SHARDED = re.compile(
    r"(query|key|value|mapping)_(kernel|bias)|(output|projection)_kernel|head/(kernel|bias)"
)


def alone(run):
    """Return the run of the same network in one process, whose weights that of a layout loads."""
    return f"{run.split('/')[0]}/alone@1x1"


@each(RUNS, LONG, reads=lambda run: [alone(run)] * (".used" in run))
def test_a_rank_holds_its_shards_only(run, ranks_of):
    layout = Run.of(run).layout
    shards_of_a_rank = min(layout.devices, layout.model)
    for rank in ranks_of(run):
        sharded, replicated = 0, 0
        for path, weight in weights(rank, "final").items():
            if SHARDED.search(path) or (layout.rows and path.endswith("embedding/table")):
                sharded += weight.nbytes
            else:
                replicated += weight.nbytes
        assert rank["bytes"] == sharded * shards_of_a_rank // layout.model + replicated
