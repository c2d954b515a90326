"""Between reads of the logs, steps copy no gradient to the host and send nothing in Python.

The steps use the GPU code path.
"""

import keras
import numpy as np

from dtransformer.trainers import Trainer
from harness.host_reads import HostReads
from tests.shared_runs import on_ranks

STEPS, MAX_BYTES = 6, 4096


def _record_host_reads(optimizer="sgd"):
    """Train a network with gradients of 16 KiB and record the host reads between reads of the logs."""
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
    trainer, reads = Trainer(keras.Sequential([keras.Input((64,)), *layers])), HostReads()
    trainer.compile(optimizer, "mse", log_every=STEPS)
    x = np.ones((4 * STEPS, 64), "float32")
    trainer.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False, callbacks=[reads])
    assert len(reads.bytes[-1]) > len(
        reads.bytes[-2]
    )  # The trainer reads the logs after the last step.
    return reads.bytes[2:-1], reads.collectives[2:]


@on_ranks("dp2@2x1+gpu")
def test_data_parallel_steps_read_nothing_on_the_host():
    sizes, collectives = _record_host_reads()
    assert not any(sizes) and not any(collectives), (sizes, collectives)


@on_ranks("mp2@2x1+gpu")
def test_mesh_steps_read_only_scalars_on_the_host():
    sizes, collectives = _record_host_reads()
    assert max(size for step_sizes in sizes for size in step_sizes) <= MAX_BYTES, sizes
    assert not any(collectives), collectives
    scaled, _ = _record_host_reads(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    assert scaled == sizes
