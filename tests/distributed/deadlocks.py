"""Let two ranks deadlock outside of a step: a program that tests launch.

horovodrun -np 2 python -m tests.distributed.deadlocks SCENARIO model|data|stage|shards FOLDER

In each of the `SCENARIOS`, a single rank raises an error that the script catches, or a single rank
calls a function that needs all ranks. The script then continues.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.collectives import all_reduce_sum
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from dtransformer.trainers.engines.pipeline_step import PipelineStep
from harness.networks import translation_model

# Parallel axis of the two ranks -> fields of the config.
AXES = {
    "model": {"model_parallel": 2},
    "data": {},
    "stage": {"pipeline_stage": 2, "micro_batch_num": 2},
    "shards": {"optimizer_shard": 3, "parallel_optimizer_threshold": 0},
}


class FailsAlone(keras.callbacks.Callback):
    """Callback that raises an error on the last rank after the first step."""

    def on_train_batch_end(self, batch, logs=None):
        if not job.is_chief():
            raise OSError("no space is left")


def fail(step, instruction):
    """Raise an error while this rank has pending sends and receives."""
    raise RuntimeError("this rank has had enough")


class Script:
    """Script that trains a network first. Its other methods are the scenarios."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.network = translation_model()
        self.trainer = Trainer(self.network)
        self.trainer.compile(keras.optimizers.SGD(1e-3), CrossEntropyLoss(ignore_id=0))
        self.fit()

    def fit(self, **options):
        inputs, labels = self.batch()
        self.trainer.fit(
            inputs, labels, batch_size=4, shuffle=False, verbose=0, epochs=2, **options
        )

    def batch(self):
        ids = np.full((8, 4), 5, "int32")
        return {"source": ids, "target": ids}, ids

    def caught(self, action, *args, **options):
        try:
            action(*args, **options)
        except Exception as error:
            print(f"rank {job.rank()} caught {str(error)[:300]}", flush=True)

    def fit_after_a_callback(self):
        self.caught(self.fit, callbacks=[FailsAlone()])
        self.fit()

    def barrier_after_a_callback(self):
        self.caught(self.fit, callbacks=[FailsAlone()])
        job.barrier()

    def fit_after_a_stage(self):
        """The last rank fails in the middle of a step while the other rank waits for its sends."""
        compute = PipelineStep._backward
        if not job.is_chief():
            PipelineStep._backward = fail
        self.caught(self.fit)
        PipelineStep._backward = compute
        self.fit()

    def fit_after_data(self):
        """The data of one rank raise an error."""

        def batches():
            yield self.batch()
            if not job.is_chief():
                raise OSError("a file is gone")
            yield self.batch()

        ids = tf.TensorSpec([8, 4], "int32")
        spec = ({"source": ids, "target": ids}, ids)
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        self.caught(self.trainer.fit, data, verbose=0, shard=True)
        self.fit()

    def evaluate(self):
        if job.is_chief():
            self.trainer.evaluate(*self.batch(), batch_size=4, verbose=0)

    def predict(self):
        if job.is_chief():
            self.trainer.predict(self.batch()[0], batch_size=4, verbose=0)
        self.fit()

    def call(self):
        if job.is_chief():
            self.trainer(self.batch()[0])
        job.barrier()

    def save(self):
        if job.is_chief():
            self.trainer.save(self.folder / "alone")
        self.fit()

    def save_in_a_thread(self):
        if job.is_chief():
            self.trainer.save(self.folder / "alone", wait=False)
        self.trainer.evaluate(*self.batch(), batch_size=4, verbose=0)

    def restore(self):
        self.trainer.save(self.folder / "both")
        if job.is_chief():
            self.trainer.restore(self.folder / "both")
        self.trainer.train_on_batch(*self.batch())

    def read(self):
        if job.is_chief():
            self.network.get_weights()
        job.barrier()

    def begin(self):
        """Only one rank compiles the trainer again, which broadcasts the weights."""
        if job.is_chief():
            self.trainer.compile("sgd", CrossEntropyLoss(ignore_id=0))
        self.fit()

    def group(self):
        if job.is_chief():
            job.new_group([0, 1])
        job.barrier()

    def collective(self):
        if job.is_chief():
            all_reduce_sum(tf.ones([2]))
        self.fit()

    def function(self):
        total = tf.function(all_reduce_sum)
        total(tf.ones([2]))
        if job.is_chief():
            total(tf.ones([2]))
        self.fit()

    def shutdown(self):
        if job.is_chief():
            return
        self.fit()

    def save_weights(self):
        self.network.save_weights(self.folder / "network.weights.h5")
        weights = self.network.get_weights()
        if job.is_chief():
            print("saved", len(weights), flush=True)


SCENARIOS = [name for name in vars(Script) if not name.startswith("_")]


def main(scenario, axis, folder):
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**AXES[axis]))
    script = Script(folder)
    print(f"rank {job.rank()} begins", flush=True)
    getattr(script, scenario)()
    dtransformer.shutdown()
    print(f"rank {job.rank()} is done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
