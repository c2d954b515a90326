"""Saves checkpoints on several layouts, and restores them on other ones."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from harness.batches import EVEN, batches, replica_share
from harness.networks import make
from harness.training import Record, as_taken

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
)
ALONE = CHAIN[0]
# What a layout restores, besides all the others in the long suite.
RESTORED = {
    name: QUICK[-2:] if name == ALONE else CHAIN[max(number - 2, 0) : number]
    for number, name in enumerate(CHAIN)
}
# Layouts of runs that are resumed on the same layout (long suite).
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
    model, optimizer = make(network)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    return trainer


def losses(trainer, begin, number, network=NETWORK):
    """Train on some batches, all of one shape; return the losses of the steps."""
    of_all = batches(begin + number, trainer.network.vocab_size, 0, (EVEN,))[begin:]
    data = as_taken(network, replica_share(of_all, EVEN[0]))
    data = data.apply(tf.data.experimental.assert_cardinality(number))
    record = Record()
    trainer.fit(data, callbacks=[record], verbose=0, shard=False)
    return record["step_loss"]


def restore(trainer, folder, saved, name, network=NETWORK):
    """Restore a checkpoint, save it again, and train on; return the losses."""
    dtransformer.set_seed(OTHER_SEED)
    restored = trainer.restore(checkpoint_of(folder, saved))
    assert restored.step == STEPS_BEFORE and job.seed() == SEED
    trainer.save(checkpoint_of(folder, saved, name))
    return losses(trainer, STEPS_BEFORE, STEPS_AFTER, network)


def save_and_restore(folder, layout):
    """Train, save, and go on; then go on from what the layouts before have saved."""
    trainer = new_trainer()
    losses(trainer, 0, STEPS_BEFORE)
    trainer.save(checkpoint_of(folder, layout.name))
    if layout.name in REPLICATED:
        trainer.save(replicated(folder, layout.name), replicas=True)
    after = losses(trainer, STEPS_BEFORE, STEPS_AFTER)
    before = RESTORED[layout.name] if layout.name != ALONE else ()
    return {
        "after": after,
        "restored": {saved: restore(trainer, folder, saved, layout.name) for saved in before},
    }


def restore_the_others(folder, layout):
    """Go on from what all the other layouts have saved, and from its own."""
    trainer, name = new_trainer(seed=OTHER_SEED), layout.name
    others = [saved for saved in CHAIN if saved not in RESTORED[name]]
    return {"restored": {saved: restore(trainer, folder, saved, name) for saved in others}}


def sums_over_rows(folder, layout):
    """As `save_and_restore`, with states that have not their weights' shapes, and one process'."""
    own, alone = (pathlib.Path(folder) / f"adafactor-{name}" for name in (layout.name, ALONE))
    trainer = new_trainer("adafactor")
    losses(trainer, 0, STEPS_BEFORE)
    trainer.save(own)
    after = losses(trainer, STEPS_BEFORE, STEPS_AFTER)
    if own == alone:
        return {"after": after}
    return {"after": after, "restored": continued(trainer, alone)}


def continued(trainer, path):
    """Return the losses of a trainer that goes on from a checkpoint."""
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
        num_buckets=1,
        pad_to_bucket=True,
        pad_rows_to_multiple_of=2,
        shard_index=index,
        num_shards=count,
        seed=5,
    )


def resume(folder, layout):
    """Train two epochs with shuffling and dropout; again from the middle of the first one."""
    folder = pathlib.Path(folder) / f"resumed-{layout.name}"
    policy = "mixed_float16" if layout.name in IN_16_BITS else "float32"
    found = {}
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
        found[kind] = {
            "losses": record["step_loss"],
            "history": {
                name: [float(value) for value in history.history[name]]
                for name in ("loss", "accuracy", "step_loss", "gradient_norm")
            },
        }
        keras.backend.clear_session()  # and the policy
    return found


TASKS = {
    task.__name__: task for task in (save_and_restore, restore_the_others, sums_over_rows, resume)
}
