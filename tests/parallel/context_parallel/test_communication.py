"""Promise: attention of a sharded sequence sends what its plan says; besides, only gradients go."""

import collections

import numpy as np

from dtransformer.models import CausalLM
from dtransformer.parallel.context_parallel.plan import make_plan
from tests.on_mesh import HIDDEN, ROWS, TARGET_LENGTH, VOCAB_SIZE, on_mesh, start, stop, trainer_of
from tests.parallel.context_parallel.formula import elements_sent

HEADS, SHARDS = 4, 2
ALL_TO_ALLS = {  # forward: of queries, keys, values and context; or of stripes, keys with values
    "ulysses": {"forward": 4, "backward": 4},
    "all_gather": {"forward": 3, "backward": 4},
    "ring": {"forward": 2 + SHARDS, "backward": 2 + 2 * SHARDS},
}


def report_of(mode):
    start(model_parallel=1, context_parallel=SHARDS, context_parallel_mode=mode)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_layers": 1}
    trainer = trainer_of(CausalLM(VOCAB_SIZE, dropout_rate=0.0, **sizes))
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, (ROWS, TARGET_LENGTH), "int32")
    trainer.train_on_batch(ids, ids)
    report = trainer.communication_report(), str(trainer.memory_report())
    stop()
    return report


@on_mesh
def test_what_is_sent():
    memory = {}
    for mode, numbers in ALL_TO_ALLS.items():
        report, memory[mode] = report_of(mode)
        heads = ROWS, HEADS, TARGET_LENGTH, HIDDEN // HEADS
        plan = make_plan(mode, SHARDS, heads, heads, causal=True, has_bias=False)
        sent, found = collections.Counter(), collections.Counter()
        for c in report.of_layer("blocks/block_0"):
            assert c.over == "context"
            direction = "backward" if c.backward else "forward"
            if c.kind == "all-to-all":
                sent[direction] += c.elements_sent
                found[direction] += 1
            else:  # the gradients of weights
                assert c.kind == "all-reduce" and direction == "backward", c
                assert c.elements <= 4 * HIDDEN * HIDDEN, c
        assert dict(found) == numbers, mode
        assert dict(sent) == elements_sent(plan, ROWS, HEADS, HEADS, HIDDEN // HEADS), mode
    assert "blocks blockwise" in memory["ring"]
