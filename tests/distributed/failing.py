"""A training job in which one rank fails as asked: a program that tests launch.

horovodrun -np 2 python -m tests.distributed.failing HOW model|data|stage FOLDER

HOW is slow (all steps; none fails), straggle (the last rank waits longer for its data), kill, raise,
crash (in C), midst or save; freeze (SIGSTOP), unequal (the rank goes on to something else), loop (it
does not come back from a callback), or preempt (SIGUSR1, where checkpoints are saved in FOLDER).
"""

import ctypes
import os
import signal
import sys
import tempfile
import time

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.checkpoint import writer
from dtransformer.trainers.engines.pipeline_step import PipelineStep
from harness.networks import translation_model

FAIL_IN_STEP = 5
# What the two ranks are together.
AXES = {
    "model": {"model_parallel": 2},
    "data": {},
    "stage": {"pipeline_stage": 2, "micro_batch_num": 4},
}


class Fail(keras.callbacks.Callback):
    """Lets the last rank fail after some steps."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if job.is_chief():
            print(f"step {batch + 1}", flush=True)
        if batch + 1 < FAIL_IN_STEP or job.rank() != job.size() - 1:
            return
        if self.how == "slow":
            time.sleep(0.5)
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "raise":
            raise RuntimeError("this rank has had enough")
        elif self.how == "crash":
            ctypes.string_at(0)
        elif self.how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "preempt":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.how == "unequal":
            job.barrier()
        elif self.how == "loop":
            while True:
                pass
        elif self.how == "midst":
            PipelineStep._backward = fail

    def on_train_batch_begin(self, batch, logs=None):
        """Wait for a batch; save, while the last rank is killed."""
        if self.how == "straggle":
            time.sleep(0.4 if job.rank() == job.size() - 1 else 0.2)
        if self.how == "save" and batch == FAIL_IN_STEP:
            if job.rank() == job.size() - 1:
                writer.write_shards = lambda save: os.kill(os.getpid(), signal.SIGKILL)
            folder = os.path.join(tempfile.gettempdir(), "dtransformer-failing-save")
            self.model.save(folder, wait=False)


def fail(step, instruction):
    """Fail while sends to and from this rank are on their way."""
    raise RuntimeError("this rank has had enough")


def main(how, axis, folder):
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**AXES[axis]))
    model = translation_model()
    model.build()
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss(ignore_id=0))
    ids = np.full((16 * 50, 8), 5, "int32")
    callbacks = [Fail(how), *[ModelCheckpoint(folder)] * (how == "preempt")]
    inputs = {"source": ids, "target": ids}
    trainer.fit(inputs, ids, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
    dtransformer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
