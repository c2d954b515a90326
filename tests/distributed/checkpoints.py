"""Saves checkpoints on several layouts, and restores each of them on every other one.

horovodrun -np 2 python -m tests.distributed.checkpoints save FOLDER
horovodrun -np 2 python -m tests.distributed.checkpoints restore FOLDER
"""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from tests.distributed import layouts
from tests.distributed.jobs import Record
from tests.distributed.layouts import ALONE, Layout

NETWORK, STEPS_BEFORE, STEPS_AFTER = "deep_tied", 4, 10
GRID = {
    layout.name: layout
    for layout in (
        ALONE,
        Layout(model=2, ranks=2),  # first: after meshes of each rank, DTensor waits for ever
        Layout(data=2, ranks=2),
        Layout(data=2, model=2, ranks=2, devices=2),
        Layout(stages=2, parts=2, ranks=2),
        Layout(stages=2, parts=2, model=2, ranks=2, devices=2, rows=True),
        *(Layout(data=2, ranks=2, level=level) for level in (1, 2, 3)),
    )
}
# Runs that are resumed on the same layout.
RESUMED = ("alone@1x1", "dp2@2x1+shard2", "mp2@2x1", "pp2m2-1f1b@2x1")
# With replicated 16-bit copies of sharded weights, and loss scaling.
IN_16_BITS = ("dp2@2x1+shard2",)
# Those that also save with replicas.
REPLICATED = ("dp2@2x1", "dp2@2x1+shard1")
SEED, OTHER_SEED = 7, 99


def checkpoint_of(folder, saved, restored=None):
    """Return the path of a checkpoint, written again after it was restored on a layout."""
    return pathlib.Path(folder) / (saved if restored is None else f"{saved}-on-{restored}")


def replicated(folder, name):
    """Return the path of a checkpoint with replicas of what several ranks hold."""
    return pathlib.Path(folder) / f"{name}-replicated"


def new_trainer(network=NETWORK, seed=SEED):
    dtransformer.set_seed(seed)
    model, optimizer = layouts.make(network, num_blocks=2)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    return trainer


def losses(trainer, begin, number):
    """Train on some batches, all of one shape; return the losses of the steps."""
    index, count = job.data_shard()
    batches = layouts.batches(2 * (begin + number), 61, seed=0)[2 * begin :: 2]
    ids = tf.TensorSpec([8 // count, None], "int32")
    data = tf.data.Dataset.from_generator(
        lambda: (tf.nest.map_structure(lambda x: x[index::count], batch) for batch in batches),
        output_signature=({"source": ids, "target": ids}, ids),
    )
    data = data.apply(tf.data.experimental.assert_cardinality(number))
    record = Record()
    trainer.fit(data, callbacks=[record], verbose=0)
    return [logs["step_loss"] for logs in record.logs]


def save(folder, name):
    """Train, save, and go on; write down the losses that come after."""
    GRID[name].start()
    trainer = new_trainer()
    losses(trainer, 0, STEPS_BEFORE)
    trainer.save(checkpoint_of(folder, name))
    if name in REPLICATED:
        trainer.save(replicated(folder, name), replicas=True)
    write(folder, f"{name}-after", losses(trainer, STEPS_BEFORE, STEPS_AFTER))


def restore_all(folder, name):
    """Restore every checkpoint, save it again, and train on."""
    GRID[name].start()
    trainer, found = new_trainer(seed=OTHER_SEED), {}
    for saved in GRID:
        restored = trainer.restore(checkpoint_of(folder, saved))
        assert restored.step == STEPS_BEFORE and job.seed() == SEED
        trainer.save(checkpoint_of(folder, saved, name))
        found[saved] = losses(trainer, STEPS_BEFORE, STEPS_AFTER)
    write(folder, f"{name}-restored", found)


def shuffled_data():
    rng = np.random.default_rng(0)
    index, count = job.data_shard()
    ids = [rng.integers(4, 61, rng.integers(1, 9)) for _ in range(40)]
    ids = tf.ragged.constant([row.tolist() for row in ids], "int32")
    return TranslationBatches(
        *(ids, ids),
        batch_size=8,
        num_buckets=1,
        pad_to_bucket=True,
        pad_rows_to_multiple_of=2,
        shard_index=index,
        num_shards=count,
        seed=5,
    )


def resume(folder, name):
    """Train two epochs with shuffling and dropout; again from the middle of the first one."""
    GRID[name].start()
    folder = pathlib.Path(folder) / f"resumed-{name}"
    found = {}
    for kind, seed, path in (
        ("uninterrupted", SEED, False),
        ("resumed", OTHER_SEED, folder / "step-00000003"),
    ):
        record = Record()
        keras.config.set_dtype_policy("mixed_float16" if name in IN_16_BITS else "float32")
        trainer = new_trainer("deep_dropout", seed)
        history = trainer.fit(
            shuffled_data(),
            epochs=2,
            verbose=0,
            callbacks=[record] + [ModelCheckpoint(folder, every_steps=3, keep=None)] * (not path),
            resume=path,
        )
        found[kind] = {
            "losses": [logs["step_loss"] for logs in record.logs],
            "history": {
                name: [float(value) for value in history.history[name]]
                for name in ("loss", "accuracy", "step_loss", "gradient_norm")
            },
        }
        keras.backend.clear_session()  # and the policy
    write(folder, "results", found)


def write(folder, name, value):
    if dtransformer.is_chief():
        (pathlib.Path(folder) / f"{name}.json").write_text(json.dumps(value))


def read(folder, name):
    return json.loads((pathlib.Path(folder) / f"{name}.json").read_text())


def main(work, folder):
    works = {"save": [save], "restore": [restore_all, resume]}[work]
    for name in (name for name, layout in GRID.items() if layout.ranks == 2):
        for do in works:
            if do is not resume or name in RESUMED:
                do(folder, name)
    dtransformer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
