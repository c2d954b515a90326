"""Save a network with Keras' methods, on all ranks or on rank 0 only."""

import pathlib

import keras
import numpy as np

import dtransformer
from dtransformer.layers import FeedForward
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer

WIDTH = 16


def make():
    layers = [FeedForward(WIDTH, 2 * WIDTH, name=name) for name in ("first", "second")]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def saved(folder):
    """Save a trained network in each format and return the folder and the error of a wrong name."""
    config = dtransformer.get_parallel_config()
    degrees = config.optimizer_shard, config.pipeline_stage, config.model_parallel
    folder = pathlib.Path(folder) / "network-{}-{}-{}".format(*degrees)
    if job.is_chief():
        folder.mkdir()
    job.barrier()
    network = make()
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).standard_normal((4, WIDTH)).astype("float32")
    trainer.train_on_batch(x, x)
    network.save_weights(folder / "network.weights.h5")
    network.save(folder / "network.keras")
    trainer.save_weights(folder / "trainer.weights.h5")
    message = ""
    try:
        network.save_weights(folder / "network.txt")
    except ValueError as error:
        message = str(error)
    if degrees == (0, 1, 1) and job.is_chief():
        network.save_weights(folder / "alone.weights.h5")
    job.barrier()
    return {"folder": str(folder), "message": message}


TASKS = {"saved": saved}
