"""Trains a small network under a layout, and uses it in every other way."""

import functools
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from dtransformer.models import CausalLM, MaskedLM
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.parallel.weights.sharded_variable import own_shards
from dtransformer.trainers import Trainer
from harness.batches import EVEN, OF_EVEN_ROWS, UNEVEN, batches, replica_share
from harness.layouts import ALONE
from harness.measure import elements_sent
from harness.networks import (
    DEEP_NETWORKS,
    EPSILON,
    FORMS,
    IN_TWO_SHAPES,
    kind_of,
    loss_of,
    make,
)

STEPS, SHORT_STEPS = 20, 5
USED = ".used"  # after the name of a network that is not only trained
_DRAWN = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}
# How a network is let generate.
SEARCHES = {
    "greedy": {},
    "beam": {"beam_size": 3, "num_return_sequences": 2},
    "drawn": {"num_return_sequences": 2, **_DRAWN},
    "ruled": {"temperature": 1.5, "seed": 4, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
SHORT_SEARCHES = ("beam", "ruled")


class Record(keras.callbacks.Callback):
    """Keeps the logs of every step."""

    def on_train_begin(self, logs=None):
        self.logs, self._begin = [], time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        if not self.logs:
            self.first_step = time.monotonic() - self._begin  # seconds
        self.logs.append({name: float(value) for name, value in logs.items()})

    def __getitem__(self, name):
        return [logs[name] for logs in self.logs]


def task_of(name):
    """Return the task of a network's name, as in `"tied"` or `"tied.used"`."""
    return functools.partial(_train_and_use, name)


def _train_and_use(name, folder, layout, steps=STEPS, epsilon=EPSILON, is_short=False):
    network = name.removesuffix(USED)
    trainer, results = train(network, steps, epsilon, layout.num_blocks)
    if name == network:
        return results
    return results | use(trainer, network, folder, layout, SHORT_SEARCHES if is_short else SEARCHES)


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
    trainer.compile(optimizer, loss_of(network), log_every=1)
    record = Record()
    trainer.fit(
        _data(network, num_steps, model, seed=0), callbacks=[record], verbose=0, shard=False
    )
    results["losses"] = np.array(record["step_loss"])
    results["first_step"] = record.first_step
    if takes_gpu_branch():
        report = trainer._program.compiler.clusters
        results |= {"clusters": report.clusters, "outside": report.outside}
    shards = own_shards(model.variables)
    results["bytes"] = np.array(sum(shard.numpy().nbytes for shard in shards))
    memory = trainer.memory_report()
    results["planned"] = np.array([row.planned for row in memory.rows[:3]])
    results["measured"] = np.array([row.measured for row in memory.rows[:3]])
    results["sent"] = np.array(elements_sent(trainer))
    if "moe" in network:
        results["taken"] = np.array([one.taken for one in trainer.expert_load().layers])
    return trainer, {**results, **_read_weights(model, "final")}


def use(trainer, network, folder, layout, searches=SEARCHES):
    """Use a trained network in every other way, some of `SEARCHES`; return a dict of arrays.

    It generates with the initial weights, as 20 steps teach it to end at once. It loads
    the weights that one process has saved in the folder.
    """
    inputs, labels = batches(1, trainer.network.vocab_size, 2, shapes_of(network)[-1:])[0]
    if kind_of(network).startswith("long"):
        inputs, _ = tf.nest.map_structure(np.array, _divisible(inputs, labels))
    data = _data(network, 1, trainer.network, seed=1)
    evaluation = trainer.evaluate(data, verbose=0, shard=False, return_dict=True)
    fresh, _ = make(network, num_blocks=layout.num_blocks)
    inputs = inputs["target"] if isinstance(fresh, CausalLM | MaskedLM) else inputs
    results = {
        "evaluation": np.array([evaluation["loss"], evaluation["accuracy"]]),
        "logits": trainer.predict(inputs, verbose=0),
        **_found(fresh, inputs, searches),
    }
    trainer.save_weights(weights_file(folder, network, layout))
    if layout != ALONE:
        Trainer(fresh).load_weights(weights_file(folder, network, ALONE))
        results.update(_read_weights(fresh, "loaded"))
    return results


def _found(model, inputs, searches):
    """Return what a network generates by some of `SEARCHES`; nothing where it does not."""
    if isinstance(model, MaskedLM):
        return {}
    if isinstance(model, CausalLM):
        generate = functools.partial(model.generate, inputs, max_new_tokens=8)
    else:
        generate = functools.partial(model.generate, inputs["source"], max_length=8)
    told = {}
    tell = lambda number, ids: told.setdefault(number, []).extend(ids)
    found = {
        name: generate(**SEARCHES[name], **({"on_tokens": tell} if name == "ruled" else {}))
        for name in searches
    }
    for number, ids in enumerate(found["ruled"].numpy()):  # what was told is what was found
        assert told[number] == ids[: len(told[number])].tolist()
        assert not ids[len(told[number]) :].any()
    return {name: ids.numpy() for name, ids in found.items()}


def weights_file(folder, network, layout):
    """Return where the weights of a network are, trained under a layout."""
    return pathlib.Path(folder) / f"{network}-{layout.name}.weights.h5"


def _data(network, num_batches, model, seed):
    of_all = batches(num_batches, model.vocab_size, seed, shapes_of(network))
    return as_taken(network, replica_share(of_all))


def shapes_of(network):
    """Return the shapes of a network's batches: one, so that one is compiled, or two."""
    if network not in IN_TWO_SHAPES:
        return (EVEN,)
    return (EVEN, OF_EVEN_ROWS if network in DEEP_NETWORKS else UNEVEN)


def as_taken(network, data):
    """Return a dataset of `batches` as a network takes them."""
    kind = kind_of(network)
    return data.map(_DATA[kind]) if kind in _DATA else data


def _halves(ids):
    """Return segments: 1 and 2 in the halves of each row, 0 where it is padded."""
    return tf.where(ids == 0, 0, 1 + 2 * tf.range(tf.shape(ids)[1]) // tf.shape(ids)[1])


def _with_segments(inputs, labels):
    return inputs | {f"{name}_segments": _halves(ids) for name, ids in inputs.items()}, labels


def _divisible(inputs, labels):
    """Lengths that are a multiple of 16, padded."""
    pad = lambda ids: tf.pad(ids, [[0, 0], [0, -tf.shape(ids)[1] % 16]])
    return tf.nest.map_structure(pad, inputs), pad(labels)


def _as_texts(inputs, labels):
    return inputs["target"], labels


def _as_sentences(inputs, labels):
    """Two sentences in each text, of which the second follows in every other one."""
    ids = inputs["target"]
    types = tf.cast(_halves(ids) == 2, "int32")
    follows = tf.reduce_sum(ids, axis=1) % 2
    return {"tokens": ids, "token_types": types}, {"masked_lm": labels, "next_sentence": follows}


def _starting_with_padding(inputs, labels):
    is_start = tf.range(tf.shape(labels)[1]) == 0
    return inputs | {"target": tf.where(is_start, 0, inputs["target"])}, labels


# What the batches of some networks are made from.
_DATA = {
    "packed": _with_segments,
    "causal": _as_texts,
    "long": _divisible,
    "moe": _as_texts,
    "moe_global": _as_texts,
    "llama": _as_texts,
    "llama_lora": _as_texts,
    "llama_frozen": _as_texts,
    "bert": _as_texts,
    **dict.fromkeys(FORMS, _as_texts),
    **dict.fromkeys(
        ("long_causal", "long_moe", *(name for name in FORMS if name.startswith("long_"))),
        lambda *batch: _as_texts(*_divisible(*batch)),
    ),
    "sentences": _as_sentences,
    "bart": _starting_with_padding,
    "t5": _starting_with_padding,
}


def _read_weights(model, kind):
    return {f"{kind}/{weight.path}": np.array(weight.numpy()) for weight in model.weights}
