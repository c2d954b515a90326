"""Train small language models on token shards, and resume from a checkpoint."""

import functools
import pathlib

import keras
import numpy as np

from dtransformer.datasets import (
    LanguageModelBatches,
    NextSentenceBatches,
    SubwordTokenizer,
    write_token_shards,
)
from dtransformer.datasets.embedded import sentence_pairs
from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.training import Record

LENGTH, STOP = 24, 7
SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}


def gpt(token_shards):
    """Return a causal network, its loss and the class of its batches."""
    network = CausalLM(token_shards.vocab_size, max_length=LENGTH, **SIZES)
    return network, CrossEntropyLoss(ignore_id=IGNORED), LanguageModelBatches


def bert(token_shards):
    """Return a masked network with next-sentence head, its losses and the class of its batches."""
    vocab_size = token_shards.vocab_size + 1
    network = MaskedLM(vocab_size, max_length=LENGTH, next_sentence=True, **SIZES)
    losses = {name: CrossEntropyLoss(ignore_id=IGNORED) for name in ("masked_lm", "next_sentence")}
    return network, losses, NextSentenceBatches


def shards(folder):
    """Write the same shards of the embedded corpus on every rank and return them."""
    sentences = [english for english, _ in sentence_pairs(100)]
    tokenizer = SubwordTokenizer.train(sentences, vocab_size=120)
    documents = [sentences[i : i + 1 + i % 5] for i in range(0, len(sentences), 4)]
    return write_token_shards(documents, tokenizer, folder, shard_tokens=200, overwrite=True)


def train(make, folder, layout):
    """Train without interruption, resume from step `STOP`, and return losses and evaluation."""
    folder = pathlib.Path(folder)
    token_shards = shards(folder / f"shards-{make.__name__}-{layout.name}-{job.rank()}")
    checkpoints = folder / f"checkpoints-{make.__name__}-{layout.name}"
    index, count = job.data_shard()
    shard_options = {"shard_index": index, "num_shards": count}
    multiple = {"pad_rows_to_multiple_of": job.row_multiple()}
    options = {"length": LENGTH, "batch_size": 6, **shard_options, **multiple}

    def fit(callbacks=(), **fit_options):
        network, loss, kind = make(token_shards)
        trainer, record = Trainer(network), Record()
        batches, held_out = (
            kind(token_shards, seed=3, training=t, **options) for t in (True, False)
        )
        assert STOP < len(batches), "a resumed run must continue beyond its epoch"
        trainer.compile(keras.optimizers.SGD(0.3), loss)
        callbacks = [record, *callbacks]
        trainer.fit(batches, epochs=2, verbose=0, callbacks=callbacks, **fit_options)
        return trainer, held_out, record["step_loss"]

    trainer, held_out, losses = fit([ModelCheckpoint(checkpoints, every_steps=STOP, keep=None)])
    evaluation = trainer.evaluate(held_out, verbose=0, return_dict=True)
    resumed, _, after = fit(resume=checkpoints / f"step-{STOP:08d}")
    pairs = zip(trainer.network.get_weights(), resumed.network.get_weights(), strict=True)
    return {
        "losses": np.array(losses),
        "resumed": np.array(after),
        "same_weights": all(
            np.array_equal(weight, resumed_weight) for weight, resumed_weight in pairs
        ),
        "evaluation": [float(evaluation["loss"])],
    }


TASKS = {make.__name__: functools.partial(train, make) for make in (gpt, bert)}
