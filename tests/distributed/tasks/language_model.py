"""A small CausalLM that is trained on token shards, and once more from a checkpoint on."""

import pathlib

import keras
import numpy as np

from dtransformer.datasets import LanguageModelBatches, SubwordTokenizer, write_token_shards
from dtransformer.datasets.embedded import sentence_pairs
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.training import Record

LENGTH, STOP = 16, 7


def shards(folder):
    """Write, and return, the same shards of the embedded corpus on every rank."""
    sentences = [english for english, _ in sentence_pairs(80)]
    tokenizer = SubwordTokenizer.train(sentences, vocab_size=120)
    documents = [" ".join(sentences[i : i + 1 + i % 5]) for i in range(0, len(sentences), 4)]
    return write_token_shards(documents, tokenizer, folder, shard_tokens=200, overwrite=True)


def train(folder, layout):
    """Train without a break, then again from a step on; return the losses, and what is evaluated."""
    folder = pathlib.Path(folder)
    own = shards(folder / f"shards-{layout.name}-{job.rank()}")
    checkpoints = folder / f"checkpoints-{layout.name}"
    index, count = job.data_shard()
    share = {"shard_index": index, "num_shards": count}
    multiple = {"pad_rows_to_multiple_of": job.rows_multiple_of()}
    options = {"length": LENGTH, "batch_size": 10, **share, **multiple}

    def fit(callbacks=(), **fit_options):
        network = CausalLM(
            own.vocab_size,
            hidden_size=16,
            num_heads=2,
            num_layers=2,
            max_length=LENGTH,
            dropout_rate=0.0,
        )
        trainer, record = Trainer(network), Record()
        batches = LanguageModelBatches(own, seed=3, **options)
        trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss(ignore_id=batches.ignore_id))
        assert STOP < len(batches), "a resumed run has to go on beyond its epoch"
        trainer.fit(batches, epochs=2, verbose=0, callbacks=[record, *callbacks], **fit_options)
        return trainer, record["step_loss"]

    trainer, losses = fit([ModelCheckpoint(checkpoints, every_steps=STOP, keep=None)])
    held_out = LanguageModelBatches(own, training=False, **options)
    evaluation = trainer.evaluate(held_out, verbose=0, return_dict=True)
    resumed, after = fit(resume=checkpoints / f"step-{STOP:08d}")
    pairs = zip(trainer.network.get_weights(), resumed.network.get_weights(), strict=True)
    return {
        "losses": np.array(losses),
        "resumed": np.array(after),
        "same_weights": all(np.array_equal(one, other) for one, other in pairs),
        "evaluation": [float(evaluation["loss"])],
    }


TASKS = {"train": train}
