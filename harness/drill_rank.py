"""A rank of a job that is let to fail: the program that benchmarks/drills.py launches.

dtransformer launch -np 2 -- python -m harness.drill_rank FOLDER LAYOUT STEPS PAUSE DROPOUT
"""

import hashlib
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.layouts import layout_of

STEPS_OF_AN_EPOCH = 7


class Tell(keras.callbacks.Callback):
    """Tells which process each rank is, and each step."""

    def __init__(self, folder, pause):
        super().__init__()
        self.folder, self.pause = folder, pause

    def on_train_begin(self, logs=None):
        path = self.folder / "pids" / str(dtransformer.rank())
        fresh = path.with_suffix(".new")
        fresh.write_text(str(os.getpid()))
        os.replace(fresh, path)

    def on_train_batch_end(self, batch, logs=None):
        if dtransformer.is_chief():
            loss = float(logs["step_loss"])
            print(f"step {int(self.model.optimizer.iterations)} loss {loss!r}", flush=True)
        time.sleep(self.pause)


class EndAt(keras.callbacks.Callback):
    """Ends training after a step."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) >= self.steps:
            self.model.stop_training = True


def digest_of(trainer):
    """Return a checksum of all weights; on rank 0."""
    folder = pathlib.Path(sys.argv[1])
    path = folder / "last.weights.h5"
    trainer.save_weights(path)
    if not dtransformer.is_chief():
        return None
    import h5py

    content = hashlib.sha256()
    with h5py.File(path) as file:
        arrays = []
        file.visititems(lambda name, one: arrays.append((name, one)))
        for name, one in sorted(arrays):
            if hasattr(one, "shape"):
                content.update(name.encode() + np.asarray(one).tobytes())
    return content.hexdigest()


def main(folder, layout, steps, pause, dropout):
    folder, steps = pathlib.Path(folder), int(steps)
    layout_of(layout).start()
    ids = np.random.default_rng(0).integers(4, 100, (16 * STEPS_OF_AN_EPOCH, 9)).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((ids[:, :-1], ids[:, 1:])).batch(16)
    model = CausalLM(100, hidden_size=32, num_heads=2, num_layers=4, dropout_rate=float(dropout))
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    saving = ModelCheckpoint(folder / "checkpoints", every_steps=2, keep=3)
    trainer.fit(
        data,
        epochs=-(-steps // STEPS_OF_AN_EPOCH),
        verbose=0,
        callbacks=[Tell(folder, float(pause)), EndAt(steps), saving],
        resume=True,
    )
    content, done = digest_of(trainer), int(trainer.optimizer.iterations)
    if dtransformer.is_chief():
        print(f"ended at {done} with {content}", flush=True)
    dtransformer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
