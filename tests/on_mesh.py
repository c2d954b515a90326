"""Tests that run in a process with a mesh of a few devices, and small models for them."""

import functools

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from harness.networks import translation_model
from tests.shared_runs import on_ranks

ROWS, SOURCE_LENGTH, TARGET_LENGTH, HIDDEN, VOCAB_SIZE = 8, 12, 16, 32, 62
# Number of elements of the encoder's and the decoder's hidden states.
SOURCE, TARGET = ROWS * SOURCE_LENGTH * HIDDEN, ROWS * TARGET_LENGTH * HIDDEN


def on_mesh(function):
    """Turn a function into a test that starts without a job and may `start` meshes."""

    @functools.wraps(function)
    def body():
        stop()
        function()
        stop()

    return on_ranks("mp4@1x4")(body)


def start(data_parallel=1, model_parallel=2, **fields):
    """Start a mesh with exactly one device per shard, to save compile time."""
    fields = {"data_parallel": data_parallel, "model_parallel": model_parallel, **fields}
    config = dtransformer.TransformerOpParallelConfig(**fields)
    devices = data_parallel * model_parallel * config.context_parallel
    dtransformer.init(config, local_devices=devices)


def stop():
    dtransformer.shutdown()
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
    dtransformer.set_seed(0)


def network(**options):
    model = translation_model(
        VOCAB_SIZE,
        **{
            "hidden_size": HIDDEN,
            "num_heads": 4,
            "encoder_layers": 1,
            "decoder_layers": 1,
            **options,
        },
    )
    model.build()
    return model


def batch(rows=ROWS, s=SOURCE_LENGTH, t=TARGET_LENGTH):
    rng = np.random.default_rng(0)
    source, target, labels = (rng.integers(4, VOCAB_SIZE, (rows, n), "int32") for n in (s, t, t))
    return {"source": source, "target": target}, labels


def make_trainer(model, optimizer=None, **options):
    trainer = Trainer(model)
    loss = CrossEntropyLoss(0.1, ignore_id=0)
    # AdamW is avoided because tracing its updates takes longer than everything else.
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    trainer.compile(optimizer, loss, **options)
    return trainer


def losses(trainer, steps=3, **shape):
    return [
        float(trainer.train_on_batch(*batch(**shape), return_dict=True)["step_loss"])
        for _ in range(steps)
    ]


@functools.cache
def losses_without_mesh():
    """Return the losses of a network without a mesh. Call it before a mesh starts."""
    return losses(make_trainer(network()))


def report_after_a_step(model_options=None, **fields):
    start(**fields)
    trainer = make_trainer(network(**(model_options or {})))
    losses(trainer, steps=1)
    return trainer.communication_report()


def sent_collectives(report, layer):
    """Return a layer's collectives as a sorted list of (pass, kind, elements)."""
    return sorted(
        ("backward" if c.backward else "forward", c.kind, c.elements)
        for c in report.get_layer(layer)
    )


def raises(error, words, function):
    try:
        function()
    except error as caught:
        for word in words:
            assert word in str(caught), f"{word!r} is not in: {caught}"
    else:
        raise AssertionError(f"no {error.__name__} with {words}")
