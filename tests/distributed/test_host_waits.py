"""Promise: ordinary steps of ranks wait for no copy of a gradient, and Python sends nothing in them.

The steps go the way of GPUs.
"""

import keras
import numpy as np

from dtransformer.trainers import Trainer
from harness.host_reads import HostReads
from tests.shared_runs import on_ranks

STEPS, MOST_BYTES = 6, 4096


def _reads_of_steps(optimizer="sgd"):
    """Train a network whose gradients have 16 KiB; return what steps between two reads of logs read."""
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
    trainer, reads = Trainer(keras.Sequential([keras.Input((64,)), *layers])), HostReads()
    trainer.compile(optimizer, "mse", log_every=STEPS)
    x = np.ones((4 * STEPS, 64), "float32")
    trainer.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False, callbacks=[reads])
    assert len(reads.bytes[-1]) > len(reads.bytes[-2])  # the last step's logs are read
    return reads.bytes[2:-1], reads.collectives[2:]


@on_ranks("dp2@2x1+gpu")
def test_data_ranks():
    sizes, collectives = _reads_of_steps()
    assert not any(sizes) and not any(collectives), (sizes, collectives)


@on_ranks("mp2@2x1+gpu")
def test_ranks_of_a_mesh():
    sizes, collectives = _reads_of_steps()
    assert max(size for of_step in sizes for size in of_step) <= MOST_BYTES, sizes
    assert not any(collectives), collectives
    scaled, _ = _reads_of_steps(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    assert scaled == sizes
