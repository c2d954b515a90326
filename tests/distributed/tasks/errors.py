"""Faults that must raise an error on every rank. Each task returns error messages by fault."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from dtransformer.trainers.checkpoint import writer
from harness.networks import translation_model
from harness.tasks import global_batches, share


def error_messages(*actions):
    """Run each action and return the error messages by the action's name."""
    messages = {}
    for action in actions:
        try:
            action()
        except ValueError as error:
            messages[action.__name__] = str(error)
    return messages


def starts():
    """Initialize wrongly, or train on different numbers of batches."""

    def different_configs():
        groups = 4 + job.rank()
        config = dtransformer.TransformerOpParallelConfig(gradient_aggregation_group=groups)
        dtransformer.init(config)

    def different_seeds():
        dtransformer.init(seed=job.rank())

    def wrong_product():
        dtransformer.init(dtransformer.TransformerOpParallelConfig(data_parallel=3))

    def different_numbers_of_batches():
        trainer = Trainer(translation_model())
        trainer.compile()
        batches = share(global_batches(2 + job.rank()))
        cardinality = tf.data.experimental.assert_cardinality(2 + job.rank())
        trainer.fit(batches.apply(cardinality), verbose=0, shard=False)

    return error_messages(
        different_configs, different_seeds, wrong_product, different_numbers_of_batches
    )


def batches():
    """Train ranks of one mesh on batches of different shapes."""

    def different_shapes():
        trainer = Trainer(translation_model())
        trainer.compile("adam", CrossEntropyLoss(ignore_id=0))
        ids = np.full((16, 8 + 8 * job.rank()), 5, "int32")
        trainer.fit({"source": ids, "target": ids}, ids, batch_size=16, verbose=0)

    return error_messages(different_shapes)


def checkpoints(folder):
    """Save and restore with faults that leave the checkpoint unchanged."""
    folder = pathlib.Path(folder) / "wrong-checkpoints"
    trainer = Trainer(translation_model())
    trainer.compile("adam")
    trainer.save(folder / "good")
    write = writer.write_shards

    def file_that_cannot_be_written():
        def fail(save):
            if job.rank() == 1:
                raise OSError("no space is left")
            return write(save)

        writer.write_shards = fail
        try:
            trainer.save(folder / "good")
        finally:
            writer.write_shards = write

    def folder_that_cannot_be_made():
        trainer.save(folder / "good" / "checkpoint.json" / "one")

    def lost_file():
        file = folder / "good" / "state.data-00001-of-00002"
        if job.is_chief():
            file.rename(folder / "lost")
        job.barrier()
        try:
            trainer.restore(folder / "good")
        finally:
            job.barrier()
            if job.is_chief():
                (folder / "lost").rename(file)
            job.barrier()

    def other_network():
        other = Trainer(translation_model(hidden_size=32))
        other.compile("adam")
        other.restore(folder / "good")

    messages = error_messages(
        file_that_cannot_be_written, folder_that_cannot_be_made, lost_file, other_network
    )
    return messages | {"restored in the end": trainer.restore(folder / "good").step}


def data_shards():
    """Use layers or metrics that need the full batch, or wrong data on the data shards."""
    x = np.arange(16, dtype="float32").reshape(8, 2)
    y = x[:, :1]
    local_x = x + job.rank()

    def trainer(*layers, **options):
        network = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
        result = Trainer(network)
        result.compile("sgd", "mse", **options)
        return result

    def other_batches():
        trainer().train_on_batch(local_x, y)

    def equal_shares():
        trainer().train_on_batch(x, y, shard=False)

    def other_rows():
        trainer().fit(local_x, y, verbose=0)

    def other_validation():
        trainer().fit(x, y, validation_data=(local_x, y), verbose=0)

    def generators():
        trainer().fit((batch for batch in [(local_x, y)] * 3), steps_per_epoch=2, verbose=0)

    def normalization():
        trainer(keras.layers.BatchNormalization())

    def normalization_that_is_unfrozen():
        layer = keras.layers.BatchNormalization(trainable=False)
        model = trainer(layer)
        layer.trainable = True
        model.fit(x, y, verbose=0)

    def metric_of_all_rows():
        root = lambda y_true, y_pred: keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))
        trainer(metrics=[root]).fit(x, y, verbose=0)

    return error_messages(
        *(other_batches, equal_shares, other_rows, other_validation, generators),
        *(normalization, normalization_that_is_unfrozen, metric_of_all_rows),
    )


def sharded_weights():
    """Use optimizers that need full weights."""
    x = np.zeros((8, 32), "float32")

    def fit(optimizer):
        trainer = Trainer(keras.Sequential([keras.Input((32,)), keras.layers.Dense(32)]))
        trainer.compile(optimizer, "mse")
        trainer.fit(x, x, verbose=0)

    def accumulated():
        fit(keras.optimizers.Adam(gradient_accumulation_steps=2))

    def averages():
        fit(keras.optimizers.Nadam(use_ema=True, ema_overwrite_frequency=2))

    def full_weights():
        fit(keras.optimizers.Lamb())

    return error_messages(accumulated, averages, full_weights)


TASKS = {
    task.__name__: task for task in (starts, batches, data_shards, sharded_weights, checkpoints)
}
