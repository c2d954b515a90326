"""Save checkpoints on several layouts and restore them on other layouts."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.datasets import LengthBuckets, TranslationBatches
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.batches import EVEN, batches, replica_share
from harness.networks import make
from harness.training import Record, convert_data

NETWORK, STEPS_BEFORE, STEPS_AFTER = "tied", 4, 5
# Each layout saves, and is restored by the next two; the last two by one process.
QUICK = ("alone@1x1", "dp2@2x1+shard1", "mp2pp2m2-1f1b@2x2+rows")
CHAIN = (
    *QUICK,
    "mp2@2x1",
    "dp2@2x1+shard3",
    "dp2@2x1+shard2",
    "pp2m2-1f1b@2x1",
    "dp2mp2@2x2",
    "dp2@2x1",
    "dp2@2x1+whole2",
    "dp2pp2m2-1f1b@4x1+shard3",
)
ALONE = CHAIN[0]
# Layout -> layouts whose checkpoints it restores in the quick suite. The long suite adds all others.
RESTORED = {
    name: QUICK[-2:] if name == ALONE else CHAIN[max(index - 2, 0) : index]
    for index, name in enumerate(CHAIN)
}
# The layout with the largest mesh runs first in a launch (see `launch_runs`), and launches of four
# ranks may run before launches of two.
RESTORED["mp2@2x1"] = (ALONE,)
RESTORED["dp2pp2m2-1f1b@4x1+shard3"] = (ALONE,)
# Layouts of runs that are resumed on the same layout (long suite).
RESUMED = ("alone@1x1", "dp2@2x1+shard2", "mp2@2x1", "pp2m2-1f1b@2x1")
# Layouts with replicated 16-bit copies of sharded weights, and loss scaling.
IN_16_BITS = ("dp2@2x1+shard2",)
# Layouts that also save a checkpoint with replicas.
REPLICATED = ("dp2@2x1", "dp2@2x1+shard1")
SEED, OTHER_SEED = 7, 99


def checkpoint_path(folder, saved, restored=None):
    """Return the path of a checkpoint, or of its copy that was saved after restoring on a layout."""
    return pathlib.Path(folder) / (saved if restored is None else f"{saved}-on-{restored}")


def replicated(folder, name):
    """Return the path of a checkpoint with replicas of the tensors that several ranks have."""
    return pathlib.Path(folder) / f"{name}-replicated"


def new_trainer(network=NETWORK, seed=SEED):
    dtransformer.set_seed(seed)
    model, optimizer = make(network)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    return trainer


def losses(trainer, start, num_steps, network=NETWORK):
    """Train on batches of one shape and return the losses of the steps."""
    all_batches = batches(start + num_steps, trainer.network.vocab_size, 0, (EVEN,))[start:]
    data = convert_data(network, replica_share(all_batches, EVEN[0]))
    data = data.apply(tf.data.experimental.assert_cardinality(num_steps))
    record = Record()
    trainer.fit(data, callbacks=[record], verbose=0, shard=False)
    return record["step_loss"]


def restore(trainer, folder, saved, name, network=NETWORK):
    """Restore a checkpoint, save it again, continue training, and return the losses."""
    dtransformer.set_seed(OTHER_SEED)
    restored = trainer.restore(checkpoint_path(folder, saved))
    assert restored.step == STEPS_BEFORE and job.seed() == SEED
    trainer.save(checkpoint_path(folder, saved, name))
    return losses(trainer, STEPS_BEFORE, STEPS_AFTER, network)


def save_and_restore(folder, layout):
    """Train, save and continue. Then resume from the checkpoints in `RESTORED`."""
    trainer = new_trainer()
    losses(trainer, 0, STEPS_BEFORE)
    trainer.save(checkpoint_path(folder, layout.name))
    if layout.name in REPLICATED:
        trainer.save(replicated(folder, layout.name), replicas=True)
    after = losses(trainer, STEPS_BEFORE, STEPS_AFTER)
    before = RESTORED[layout.name] if layout.name != ALONE else ()
    return {
        "after": after,
        "restored": {saved: restore(trainer, folder, saved, layout.name) for saved in before},
    }


def restore_remaining(folder, layout):
    """Resume from the checkpoints that are not in `RESTORED`."""
    trainer, name = new_trainer(seed=OTHER_SEED), layout.name
    other_layouts = [saved for saved in CHAIN if saved not in RESTORED[name]]
    return {"restored": {saved: restore(trainer, folder, saved, name) for saved in other_layouts}}


def sums_over_rows(folder, layout):
    """Save and resume with Adafactor, whose states have other shapes than the weights."""
    local_path, one_process_path = (
        pathlib.Path(folder) / f"adafactor-{name}" for name in (layout.name, ALONE)
    )
    trainer = new_trainer("adafactor")
    losses(trainer, 0, STEPS_BEFORE)
    trainer.save(local_path)
    after = losses(trainer, STEPS_BEFORE, STEPS_AFTER)
    if local_path == one_process_path:
        return {"after": after}
    return {"after": after, "restored": continued(trainer, one_process_path)}


def continued(trainer, path):
    """Restore a checkpoint into a trainer, continue training, and return the losses."""
    assert trainer.restore(path).step == STEPS_BEFORE
    return losses(trainer, STEPS_BEFORE, STEPS_AFTER)


def shuffled_data():
    rng = np.random.default_rng(0)
    index, count = job.data_shard()
    ids = [rng.integers(4, 61, rng.integers(1, 9)) for _ in range(40)]
    ids = tf.ragged.constant([row.tolist() for row in ids], "int32")
    return TranslationBatches(
        *(ids, ids),
        batch_size=8,
        buckets=LengthBuckets(1, pad_to_bounds=True),
        pad_rows_to_multiple_of=2,
        shard_index=index,
        num_shards=count,
        seed=5,
    )


def resume(folder, layout):
    """Train two epochs with shuffling and dropout. Then resume in the middle of the first epoch."""
    folder = pathlib.Path(folder) / f"resumed-{layout.name}"
    policy = "mixed_float16" if layout.name in IN_16_BITS else "float32"
    results = {}
    for kind, seed, path in (
        ("uninterrupted", SEED, False),
        ("resumed", OTHER_SEED, folder / "step-00000003"),
    ):
        record = Record()
        keras.config.set_dtype_policy(policy)
        trainer = new_trainer("dropout", seed)
        history = trainer.fit(
            shuffled_data(),
            epochs=2,
            verbose=0,
            callbacks=[record] + [ModelCheckpoint(folder, every_steps=3, keep=None)] * (not path),
            resume=path,
            shard=False,
        )
        results[kind] = {
            "losses": record["step_loss"],
            "history": {
                name: [float(value) for value in history.history[name]]
                for name in ("loss", "accuracy", "step_loss", "gradient_norm")
            },
        }
        keras.backend.clear_session()  # This also resets the dtype policy.
    return results


TASKS = {
    task.__name__: task for task in (save_and_restore, restore_remaining, sums_over_rows, resume)
}
