"""Attention over a sharded sequence sends exactly the planned elements."""

import collections

import numpy as np
import pytest

from dtransformer.models import CausalLM
from dtransformer.parallel.context_parallel.plan import make_plan
from tests.on_mesh import (
    HIDDEN,
    ROWS,
    TARGET_LENGTH,
    VOCAB_SIZE,
    make_trainer,
    on_mesh,
    start,
    stop,
)
from tests.parallel.context_parallel.formula import elements_sent

HEADS = 4
# Mode and number of shards -> number of all-to-alls. Ulysses exchanges queries, keys, values and
# context. The other modes exchange stripes, and keys together with values.
ALL_TO_ALLS = {
    ("ulysses", 2): {"forward": 4, "backward": 4},
    ("all_gather", 2): {"forward": 3, "backward": 4},
    ("ring", 2): {"forward": 2 + 2, "backward": 2 + 2 * 2},
}
# Four shards are two rings of two.
TWO_RINGS = {("ulysses_ring", 4): {"forward": 2 + 2, "backward": 2 + 2 * 2}}


def train_and_report(mode, shards):
    start(model_parallel=1, context_parallel=shards, context_parallel_mode=mode)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_layers": 1}
    trainer = make_trainer(CausalLM(VOCAB_SIZE, dropout_rate=0.0, **sizes))
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, (ROWS, TARGET_LENGTH), "int32")
    trainer.train_on_batch(ids, ids)
    report = trainer.communication_report(), str(trainer.memory_report())
    stop()
    return report


@on_mesh
def test_sent_elements_match_the_formula():
    check(ALL_TO_ALLS)


@pytest.mark.long
@on_mesh
def test_sent_elements_of_two_rings_match_the_formula():
    check(TWO_RINGS)


def check(all_to_alls):
    memory = {}
    for (mode, shards), num_calls in all_to_alls.items():
        report, memory[mode] = train_and_report(mode, shards)
        heads = ROWS, HEADS, TARGET_LENGTH, HIDDEN // HEADS
        plan = make_plan(mode, shards, heads, heads, causal=True, has_bias=False)
        elements, counts = collections.Counter(), collections.Counter()
        for c in report.get_layer("blocks/block_0"):
            assert c.over == "context"
            direction = "backward" if c.backward else "forward"
            if c.kind == "all-to-all":
                elements[direction] += c.elements_sent
                counts[direction] += 1
            else:  # gradients of weights
                assert c.kind == "all-reduce" and direction == "backward", c
                assert c.elements <= 4 * HIDDEN * HIDDEN, c
        assert dict(counts) == num_calls, mode
        assert dict(elements) == elements_sent(plan, ROWS, HEADS, HEADS, HIDDEN // HEADS), mode
    for report in memory.values():
        assert "blocks blockwise" in report
