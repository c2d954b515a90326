"""Trains a small network under a layout, and uses it in every other way."""

import functools
import pathlib

import keras
import numpy as np
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel.sharded_variable import own_shards
from dtransformer.trainers import Trainer
from harness.batches import batches, replica_share
from harness.layouts import ALONE
from harness.measure import elements_sent
from harness.networks import DEEP_NETWORKS, EPSILON, make

STEPS = 20
USED = ".used"  # after the name of a network that is not only trained


class Record(keras.callbacks.Callback):
    """Keeps the logs of every step."""

    def on_train_begin(self, logs=None):
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})

    def __getitem__(self, name):
        return [logs[name] for logs in self.logs]


def task_of(name):
    """Return the task of a network's name, as in `"tied"` or `"tied.used"`."""
    return functools.partial(_train_and_use, name)


def _train_and_use(name, folder, layout, steps=STEPS, epsilon=EPSILON):
    network = name.removesuffix(USED)
    trainer, results = train(network, steps, epsilon, layout.num_blocks)
    return results | use(trainer, network, folder, layout) if name != network else results


def train(network, num_steps=STEPS, epsilon=EPSILON, num_blocks=4):
    """Train a network under the current layout.

    All ranks have to call, as each holds a part of the weights.

    Returns:
        The trainer; and a dict of arrays: `"losses"` of all steps; each weight, unsharded,
        before and after, as `"initial/PATH"` and `"final/PATH"`; and `"bytes"`, what
        this rank holds of them.
    """
    model, optimizer = make(network, epsilon, num_blocks)
    model.build()
    results = _read_weights(model, "initial")
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    record = Record()
    trainer.fit(
        _data(network, num_steps, model, seed=0), callbacks=[record], verbose=0, shard=False
    )
    results["losses"] = np.array(record["step_loss"])
    shards = own_shards(model.variables)
    results["bytes"] = np.array(sum(shard.numpy().nbytes for shard in shards))
    memory = trainer.memory_report()
    results["planned"] = np.array([row.planned for row in memory.rows[:3]])
    results["measured"] = np.array([row.measured for row in memory.rows[:3]])
    results["sent"] = np.array(elements_sent(trainer))
    return trainer, {**results, **_read_weights(model, "final")}


def use(trainer, network, folder, layout):
    """Use a trained network in every other way; return a dict of arrays.

    It generates with the initial weights, as 20 steps teach it to end at once. It loads
    the weights that one process has saved in the folder.
    """
    model = trainer.network
    inputs, _ = batches(2, model.vocab_size, seed=2)[1]
    data = _data(network, 1, model, seed=1)
    evaluation = trainer.evaluate(data, verbose=0, shard=False, return_dict=True)
    fresh, _ = make(network, num_blocks=layout.num_blocks)
    if isinstance(fresh, CausalLM):
        inputs = inputs["target"]
        generate = functools.partial(fresh.generate, inputs, max_new_tokens=8)
    else:
        generate = functools.partial(fresh.generate, inputs["source"], max_length=8)
    results = {
        "evaluation": np.array([evaluation["loss"], evaluation["accuracy"]]),
        "logits": trainer.predict(inputs, verbose=0),
        "greedy": generate().numpy(),
        "beam": generate(beam_size=3).numpy(),
    }
    trainer.save_weights(weights_file(folder, network, layout))
    if layout != ALONE:
        Trainer(fresh).load_weights(weights_file(folder, network, ALONE))
        results.update(_read_weights(fresh, "loaded"))
    return results


def weights_file(folder, network, layout):
    """Return where the weights of a network are, trained under a layout."""
    return pathlib.Path(folder) / f"{network}-{layout.name}.weights.h5"


def _data(network, num_batches, model, seed):
    """The networks for pipelines have batches that can be divided into micro-batches."""
    of_all = batches(num_batches, model.vocab_size, seed, same_rows=network in DEEP_NETWORKS)
    data = replica_share(of_all)
    if network == "deep_packed":
        return data.map(lambda x, y: (x | {f"{k}_segments": _halves(x[k]) for k in x}, y))
    return (
        data.map(lambda x, y: (x["target"], y))
        if network in ("deep_causal", "deep_llama")
        else data
    )


def _halves(ids):
    """Return segments: 1 and 2 in the halves of each row, 0 where it is padded."""
    return tf.where(ids == 0, 0, 1 + 2 * tf.range(tf.shape(ids)[1]) // tf.shape(ids)[1])


def _read_weights(model, kind):
    return {f"{kind}/{weight.path}": np.array(weight.numpy()) for weight in model.weights}
