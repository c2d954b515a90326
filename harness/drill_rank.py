"""Rank of a job for drills with faults. benchmarks/drills.py launches this program.

dtransformer launch -np 2 -- python -m harness.drill_rank FOLDER dp2@2x1 STEPS
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.layouts import parse_layout

STEPS_OF_AN_EPOCH = 7


def write_process_id(folder, name):
    """Write this rank's process id to the file FOLDER/NAME/RANK."""
    rank = os.environ.get("HOROVOD_RANK", "0")
    path = pathlib.Path(folder) / name / rank
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(str(os.getpid()))
    os.replace(fresh, path)


class ReportSteps(keras.callbacks.Callback):
    """Callback that reports each rank's process id and each step, and executes orders from a file."""

    def __init__(self, folder, pause):
        super().__init__()
        self.folder, self.pause = folder, pause
        self.order = folder / "orders" / os.environ.get("HOROVOD_RANK", "0")

    def on_train_begin(self, logs=None):
        write_process_id(self.folder, "pids")

    def on_train_batch_begin(self, batch, logs=None):
        with contextlib.suppress(FileNotFoundError):
            order = self.order.read_text()
            self.order.unlink()
            if order == "raise":
                raise RuntimeError("A drill ordered this rank to raise an error.")
            if order == "unequal":
                job.barrier()

    def on_train_batch_end(self, batch, logs=None):
        if dtransformer.is_chief():
            loss = float(logs["step_loss"])
            print(f"step {int(self.model.optimizer.iterations)} loss {loss!r}", flush=True)
        if not (self.folder / "hurry").exists():
            time.sleep(self.pause)


class StopAfter(keras.callbacks.Callback):
    """Callback that ends training after a number of steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) >= self.steps:
            self.model.stop_training = True


def checksum_weights(trainer, folder):
    """Return a checksum of all weights on rank 0, and `None` on other ranks."""
    path = folder / "last.weights.h5"
    trainer.save_weights(path)
    if not dtransformer.is_chief():
        return None
    import h5py

    content = hashlib.sha256()
    with h5py.File(path) as file:
        arrays = []
        file.visititems(lambda name, item: arrays.append((name, item)))
        for name, item in sorted(arrays):
            if hasattr(item, "shape"):
                content.update(name.encode() + np.asarray(item).tobytes())
    return content.hexdigest()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("layout")
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--predict", type=int, default=0, help="batches to predict after training")
    return parser.parse_args()


def main(args):
    write_process_id(args.folder, "begun")
    parse_layout(args.layout).start()
    ids = np.random.default_rng(0).integers(4, 100, (16 * STEPS_OF_AN_EPOCH, 9)).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((ids[:, :-1], ids[:, 1:])).batch(16)
    model = CausalLM(
        100,
        hidden_size=args.hidden,
        num_heads=2,
        num_layers=args.blocks,
        dropout_rate=args.dropout,
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    trainer.fit(
        data,
        epochs=-(-args.steps // STEPS_OF_AN_EPOCH),
        verbose=0,
        callbacks=[
            ReportSteps(args.folder, args.pause),
            StopAfter(args.steps),
            ModelCheckpoint(args.folder / "checkpoints", every_steps=2, keep=3),
        ],
        resume=True,
    )
    if args.predict:
        begin = time.perf_counter()
        trainer.predict(data.map(lambda ids, _: ids).repeat(), steps=args.predict, verbose=0)
        print(f"predicted for {time.perf_counter() - begin:.1f} s", flush=True)
    content, num_steps = checksum_weights(trainer, args.folder), int(trainer.optimizer.iterations)
    if dtransformer.is_chief():
        print(f"ended at {num_steps} with {content}", flush=True)
    dtransformer.shutdown()


if __name__ == "__main__":
    main(parse_arguments())
