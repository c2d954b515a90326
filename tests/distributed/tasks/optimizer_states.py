"""Train with bfloat16 states or overwriting averages, and resume after half of the steps."""

import pathlib

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Muon, Trainer

SEED, OTHER_SEED, STEPS, SHORT_STEPS = 7, 99, 20, 8
IDS = np.random.default_rng(0).integers(4, 62, (8, 12), "int32")
LABELS = np.roll(IDS, -1, axis=1)
ALONE = "alone@1x1"


def new_trainer(optimizer, seed):
    keras.utils.set_random_seed(0)
    dtransformer.set_seed(seed)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    trainer = Trainer(CausalLM(62, **sizes))
    trainer.network.build()
    trainer.compile(optimizer, CrossEntropyLoss(ignore_id=-100))
    return trainer


def train(trainer, steps):
    return [trainer.train_on_batch(IDS, LABELS)[0] for _ in range(steps)]


def evaluate(trainer):
    """Return the loss with the weights and with their averages, if there are any."""
    losses = trainer.evaluate(IDS, LABELS, batch_size=8, verbose=0)[:1]
    with trainer.averaged_weights():
        losses += trainer.evaluate(IDS, LABELS, batch_size=8, verbose=0)[:1]
    return losses


def states_of(make_optimizer, name, folder, layout, is_short):
    """Return losses of an uninterrupted run, of a resumed run, and from one process' checkpoint."""
    num_steps = SHORT_STEPS if is_short else STEPS
    saved_step = num_steps // 2
    path = pathlib.Path(folder) / f"{name}-{layout.name}"
    trainer = new_trainer(make_optimizer(), SEED)
    losses = train(trainer, saved_step)
    trainer.save(path)
    losses += train(trainer, num_steps - saved_step)
    row = trainer.memory_report()["optimizer states"]
    result = {
        "losses": losses,
        "evaluated": evaluate(trainer),
        "states": [row.planned, row.measured],
    }
    del trainer
    resumed = new_trainer(make_optimizer(), OTHER_SEED)
    resumed.restore(path)
    result["resumed"] = train(resumed, num_steps - saved_step)
    if layout.name != ALONE:
        resumed.restore(pathlib.Path(folder) / f"{name}-{ALONE}")
        result["from_one_process"] = train(resumed, num_steps - saved_step)
    return result


def rounded(folder, layout, is_short):
    def adamw():
        return keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-6)

    with dtransformer.parallel_config(optimizer_state_dtype="bfloat16"):
        return states_of(adamw, "rounded", folder, layout, is_short)


def rounded_muon(folder, layout, is_short):
    def muon():
        return Muon(0.01, epsilon=1e-6)

    with dtransformer.parallel_config(optimizer_state_dtype="bfloat16"):
        return states_of(muon, "rounded_muon", folder, layout, is_short)


def overwritten(folder, layout, is_short):
    def averaging():
        averages = {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3}
        return keras.optimizers.Adam(0.01, epsilon=1e-4, **averages)

    return states_of(averaging, "overwritten", folder, layout, is_short)


TASKS = {task.__name__: task for task in (rounded, rounded_muon, overwritten)}
