"""Train on two ranks and let the last one fail: a program that tests launch.

horovodrun -np 2 python -m tests.distributed.failing HOW model|data|stage FOLDER

HOW is the kind of failure:

- slow: no failure, but every step takes longer
- straggle: no failure, but the last rank waits longer for its data
- kill: SIGKILL
- raise: an exception
- crash: a segmentation fault
- midst: an exception in the middle of a pipeline step
- save: SIGKILL while a checkpoint is written
- freeze: SIGSTOP
- unequal: a barrier that the other rank does not enter
- loop: a callback that never returns
- preempt: SIGUSR1, which asks the job to save in FOLDER and stop
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
# Parallel axis of the two ranks -> fields of the config.
AXES = {
    "model": {"model_parallel": 2},
    "data": {},
    "stage": {"pipeline_stage": 2, "micro_batch_num": 4},
}


class Fail(keras.callbacks.Callback):
    """Callback that lets the last rank fail after some steps."""

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
        """Delay the batch, or kill the last rank during a save."""
        if self.how == "straggle":
            time.sleep(0.4 if job.rank() == job.size() - 1 else 0.2)
        if self.how == "save" and batch == FAIL_IN_STEP:
            if job.rank() == job.size() - 1:
                writer.write_shards = lambda save: os.kill(os.getpid(), signal.SIGKILL)
            folder = os.path.join(tempfile.gettempdir(), "dtransformer-failing-save")
            self.model.save(folder, wait=False)


def fail(step, instruction):
    """Raise an error while this rank has pending sends and receives."""
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
