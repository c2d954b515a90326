"""Train a language model for a step, and measure memory and communication of its ranks."""

import dataclasses

import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel.config.config import TransformerOpParallelConfig, get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from harness.measure import elements_sent

BATCH, LENGTH = 8, 32
SIZES = {"hidden_size": 64, "num_heads": 4, "num_layers": 4, "max_length": LENGTH}
VOCAB_SIZE = 128


def network():
    """Return the language model, not built."""
    return CausalLM(VOCAB_SIZE, dropout_rate=0.1, **SIZES)


def kept_and_sent():
    """Train a step and return bytes by use, measured or planned, and elements sent by kind."""
    trainer = Trainer(network())
    trainer.compile("adam", CrossEntropyLoss())
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, (BATCH, LENGTH + 1)).astype("int32")
    index, count = job.data_shard()
    local_ids = ids[index::count]
    trainer.train_on_batch(local_ids[:, :-1], local_ids[:, 1:], shard=False)
    report = trainer.communication_report()
    is_alone = job.mesh() is None and job.stage()[1] == 1
    rows = trainer.memory_report(local_ids[:, :-1] if is_alone else None).rows
    return {
        # The planner's logits include embeddings, so the test compares the first four kinds.
        "bytes": {row.what: row.measured or row.planned for row in rows[:4]},
        "reduced": float(elements_sent(trainer)),
        "sums": [report.summed_elements(path) for path in report.formula],
        "sent": sum(c.elements_sent for c in report.collectives if c.kind == "send/recv"),
        "parameters": trainer.network.count_params(),
    }


def recomputed():
    """Run `kept_and_sent` with recomputed blocks."""
    dtransformer.init(dataclasses.replace(get_parallel_config(), recompute=True))
    result = kept_and_sent()
    dtransformer.init(TransformerOpParallelConfig())
    return result


TASKS = {"kept_and_sent": kept_and_sent, "recomputed": recomputed}
