"""Train a small network under a layout; evaluate, predict, generate and save with it."""

import functools
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from dtransformer.models import CausalLM, MaskedLM
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from dtransformer.trainers import Trainer
from harness.batches import EVEN, OF_EVEN_ROWS, UNEVEN, batches, replica_share
from harness.layouts import ALONE
from harness.measure import elements_sent
from harness.networks import (
    DEEP_NETWORKS,
    EPSILON,
    FORMS,
    IN_TWO_SHAPES,
    get_kind,
    make,
    make_loss,
)
from harness.runs import USED

STEPS, SHORT_STEPS = 20, 5
_DRAWN = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}
# Options of `generate`.
SEARCHES = {
    "greedy": {},
    "beam": {"beam_size": 3, "num_return_sequences": 2},
    "drawn": {"num_return_sequences": 2, **_DRAWN},
    "ruled": {"temperature": 1.5, "seed": 4, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
SHORT_SEARCHES = ("beam", "ruled")


class Record(keras.callbacks.Callback):
    """Callback that keeps the logs of every step."""

    def on_train_begin(self, logs=None):
        self.logs, self._begin = [], time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        if not self.logs:
            self.first_step = time.monotonic() - self._begin  # Seconds until the end of the step.
        self.logs.append({name: float(value) for name, value in logs.items()})

    def __getitem__(self, name):
        return [logs[name] for logs in self.logs]


def get_task(name):
    """Return the task for a network's name, such as `"tied"` or `"tied.used"`."""
    return functools.partial(_train_and_use, name)


def _train_and_use(name, folder, layout, steps=STEPS, epsilon=EPSILON, is_short=False):
    network = name.removesuffix(USED)
    trainer, results = train(network, steps, epsilon, layout.num_blocks)
    if name == network:
        return results
    return results | use(trainer, network, folder, layout, SHORT_SEARCHES if is_short else SEARCHES)


def train(network, num_steps=STEPS, epsilon=EPSILON, num_blocks=4):
    """Train a network under the current layout.

    All ranks must call this function, because each one has a part of the weights.

    Returns:
        A `(trainer, results)` tuple. The dict of arrays has `"losses"` of all steps, each unsharded
        weight before and after training as `"initial/PATH"` and `"final/PATH"`, the local bytes of
        weights `"bytes"`, and planned and measured memory.
    """
    model, optimizer = make(network, epsilon, num_blocks)
    model.build()
    results = _read_weights(model, "initial")
    trainer = Trainer(model)
    trainer.compile(optimizer, make_loss(network), log_every=1)
    record = Record()
    trainer.fit(
        _data(network, num_steps, model, seed=0), callbacks=[record], verbose=0, shard=False
    )
    results["losses"] = np.array(record["step_loss"])
    results["first_step"] = record.first_step
    if takes_gpu_branch():
        report = trainer._program.compiler.clusters
        results |= {"clusters": report.clusters, "outside": report.outside}
    shards = get_local_shards(model.variables)
    results["bytes"] = np.array(sum(shard.numpy().nbytes for shard in shards))
    memory = trainer.memory_report()
    results["planned"] = np.array([row.planned for row in memory.rows[:3]])
    results["measured"] = np.array([row.measured for row in memory.rows[:3]])
    results["sent"] = np.array(elements_sent(trainer))
    if "moe" in network:
        results["taken"] = np.array([load.accepted for load in trainer.expert_load().layers])
    return trainer, {**results, **_read_weights(model, "final")}


def use(trainer, network, folder, layout, searches=SEARCHES):
    """Evaluate, predict, generate and save with a trained network, and return a dict of arrays.

    Generation uses a new network with initial weights, because after 20 steps networks end their
    outputs immediately. Under other layouts the weights saved by a single process are loaded.

    Args:
        trainer: Result of `train`.
        network: Name of the network.
        folder: Folder for weights.
        layout: The current `Layout`.
        searches: Keys of `SEARCHES`.
    """
    inputs, labels = batches(1, trainer.network.vocab_size, 2, get_shapes(network)[-1:])[0]
    if get_kind(network).startswith("long"):
        inputs, _ = tf.nest.map_structure(np.array, _divisible(inputs, labels))
    data = _data(network, 1, trainer.network, seed=1)
    evaluation = trainer.evaluate(data, verbose=0, shard=False, return_dict=True)
    new_model, _ = make(network, num_blocks=layout.num_blocks)
    inputs = inputs["target"] if isinstance(new_model, CausalLM | MaskedLM) else inputs
    results = {
        "evaluation": np.array([evaluation["loss"], evaluation["accuracy"]]),
        "logits": trainer.predict(inputs, verbose=0),
        **_generate(new_model, inputs, searches),
    }
    trainer.save_weights(weights_file(folder, network, layout))
    if layout != ALONE:
        Trainer(new_model).load_weights(weights_file(folder, network, ALONE))
        results.update(_read_weights(new_model, "loaded"))
    return results


def _generate(model, inputs, searches):
    """Return the outputs of `generate` for some of `SEARCHES`, or `{}` for a MaskedLM."""
    if isinstance(model, MaskedLM):
        return {}
    if isinstance(model, CausalLM):
        generate = functools.partial(model.generate, inputs, max_new_tokens=8)
    else:
        generate = functools.partial(model.generate, inputs["source"], max_length=8)
    streamed = {}

    def collect(index, ids):
        return streamed.setdefault(index, []).extend(ids)

    outputs = {
        name: generate(**SEARCHES[name], **({"on_tokens": collect} if name == "ruled" else {}))
        for name in searches
    }
    # The streamed tokens must equal the returned ones.
    for index, ids in enumerate(outputs["ruled"].numpy()):
        assert streamed[index] == ids[: len(streamed[index])].tolist()
        assert not ids[len(streamed[index]) :].any()
    return {name: ids.numpy() for name, ids in outputs.items()}


def weights_file(folder, network, layout):
    """Return the path of a network's weights after training under a layout."""
    return pathlib.Path(folder) / f"{network}-{layout.name}.weights.h5"


def _data(network, num_batches, model, seed):
    all_batches = batches(num_batches, model.vocab_size, seed, get_shapes(network))
    return convert_data(network, replica_share(all_batches))


def get_shapes(network):
    """Return the shapes of a network's batches: one, to compile once, or two."""
    if network not in IN_TWO_SHAPES:
        return (EVEN,)
    return (EVEN, OF_EVEN_ROWS if network in DEEP_NETWORKS else UNEVEN)


def convert_data(network, data):
    """Return a dataset of `batches` in the format of a network's inputs."""
    kind = get_kind(network)
    return data.map(_DATA[kind]) if kind in _DATA else data


def _halves(ids):
    """Return segment ids: 1 and 2 in the halves of each row, and 0 for padding."""
    return tf.where(ids == 0, 0, 1 + 2 * tf.range(tf.shape(ids)[1]) // tf.shape(ids)[1])


def _with_segments(inputs, labels):
    return inputs | {f"{name}_segments": _halves(ids) for name, ids in inputs.items()}, labels


def _divisible(inputs, labels):
    """Pad the sequences to a multiple of 16."""

    def pad(ids):
        return tf.pad(ids, [[0, 0], [0, -tf.shape(ids)[1] % 16]])

    return tf.nest.map_structure(pad, inputs), pad(labels)


def _as_texts(inputs, labels):
    return inputs["target"], labels


def _as_masked(inputs, labels):
    """Convert target texts to a quarter of their positions, which differ between rows."""
    ids = inputs["target"]
    first = tf.reduce_sum(ids, axis=1, keepdims=True) % 4
    positions = first + 4 * tf.range(tf.shape(ids)[1] // 4)
    labels = tf.gather(labels, positions, batch_dims=1)
    return {"tokens": ids, "masked_lm_positions": positions}, labels


def _as_sentences(inputs, labels):
    """Convert target texts to pairs of sentences. The label of a pair is the parity of its ids."""
    ids = inputs["target"]
    types = tf.cast(_halves(ids) == 2, "int32")
    follows = tf.reduce_sum(ids, axis=1) % 2
    return {"tokens": ids, "token_types": types}, {"masked_lm": labels, "next_sentence": follows}


def _starting_with_padding(inputs, labels):
    is_start = tf.range(tf.shape(labels)[1]) == 0
    return inputs | {"target": tf.where(is_start, 0, inputs["target"])}, labels


# Conversions from `batches` to the inputs of other networks.
_DATA = {
    "packed": _with_segments,
    "causal": _as_texts,
    "long": _divisible,
    "moe": _as_texts,
    "moe_global": _as_texts,
    "llama": _as_texts,
    "llama_lora": _as_texts,
    "llama_qlora": _as_texts,
    "llama_frozen": _as_texts,
    "bert": _as_texts,
    **dict.fromkeys(FORMS, _as_texts),
    **dict.fromkeys(
        ("long_causal", "long_moe", *(name for name in FORMS if name.startswith("long_"))),
        lambda *batch: _as_texts(*_divisible(*batch)),
    ),
    "masked": _as_masked,
    "long_masked": lambda *batch: _as_masked(*_divisible(*batch)),
    "sentences": _as_sentences,
    "bart": _starting_with_padding,
    "t5": _starting_with_padding,
}


def _read_weights(model, kind):
    return {f"{kind}/{weight.path}": np.array(weight.numpy()) for weight in model.weights}
