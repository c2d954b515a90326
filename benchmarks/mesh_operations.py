"""Operations of custom Keras layers on a mesh, compared with one device; prints JSON.

    python benchmarks/mesh_operations.py [--operations cumsum where ...] [--data 2] [--model 2]

For each operation a small model trains three steps on one device and on a mesh, in separate processes,
because DTensor ends the process at some operations. Exits with 1 if an operation computes
other losses or ends the process. An operation that raises an error passes.
"""

import argparse
import json
import multiprocessing
import sys

import keras
import numpy as np
import paths  # noqa: F401
import tensorflow as tf
from keras import ops

import dtransformer
from dtransformer.trainers import Trainer
from harness.tolerances import PARITY_LOSS

BATCH = 4
LENGTH = 300  # Above 256, masks have too many elements to become constants before DTensor.
FEATURES = 32
VOCAB_SIZE = 200
STEPS = 3
SECONDS = 120  # Until an operation counts as failed.


def mix(x, visible):
    """Return means over the visible positions [s, s] of hidden states [b, s, h]."""
    scores = ops.where(visible, 0.0, -1e9)
    return ops.softmax(scores) @ x


def positions():
    return ops.arange(LENGTH)[:, None], ops.arange(LENGTH)[None, :]


def sums(x):
    return ops.sum(x, axis=1)


def similarity(x):
    """Return the products of the rows of a batch [b, b]."""
    return sums(x) @ ops.transpose(sums(x))


def in_heads(x):
    return ops.transpose(ops.reshape(x, (BATCH, LENGTH, 4, -1)), (0, 2, 1, 3))


def attention(x):
    heads = in_heads(x)
    weights = ops.softmax(ops.einsum("bnsd,bntd->bnst", heads, heads))
    return ops.reshape(ops.transpose(weights @ heads, (0, 2, 1, 3)), x.shape)


def query_key_value(x):
    parts = ops.reshape(ops.concatenate([x, x, 2 * x], axis=-1), (BATCH, LENGTH, 3, -1))
    query, key, value = (ops.transpose(parts, (2, 0, 1, 3))[i] for i in range(3))
    return query * key + value


def scan(x):
    def add(total, row):
        return total + row, total + row

    rows = ops.transpose(x, (1, 0, 2))
    return ops.transpose(ops.scan(add, ops.zeros_like(rows[0]), rows)[1], (1, 0, 2)) / LENGTH


# Functions of hidden states [b, s, h] and ids [b, s] that return hidden states.
OPERATIONS = {
    # masks of positions
    "band_part": lambda x, ids: mix(x, tf.linalg.band_part(tf.ones((LENGTH, LENGTH)), -1, 0) > 0),
    "tril": lambda x, ids: mix(x, ops.tril(ops.ones((LENGTH, LENGTH))) > 0),
    "arange": lambda x, ids: mix(x, positions()[0] >= positions()[1]),
    "window": lambda x, ids: mix(x, ops.abs(positions()[0] - positions()[1]) < 32),
    "equal pairs": lambda x, ids: ops.cast(ids[:, :, None] == ids[:, None, :], "float32") @ x / 10,
    "attention": lambda x, ids: attention(x),
    # indices
    "x[None]": lambda x, ids: x[None][0],
    "stack()[1]": lambda x, ids: ops.stack([x, 2 * x])[1],
    "query, key, value": lambda x, ids: query_key_value(x),
    "x[:1]": lambda x, ids: x + x[:1] / 2,
    "x[-1]": lambda x, ids: x + x[-1] / 2,
    "x[1::2]": lambda x, ids: x + x[1::2][:1] / 2,
    "x[::-1]": lambda x, ids: x + x[::-1] / 2,
    "x[:, -1:]": lambda x, ids: x + x[:, -1:],
    "x[:, ::2]": lambda x, ids: x + ops.repeat(x[:, ::2], 2, axis=1),
    "x[:, ::-1]": lambda x, ids: x + x[:, ::-1],
    "x[..., ::-1]": lambda x, ids: x + x[..., ::-1],
    "slice": lambda x, ids: x + ops.slice(x, (1, 0, 0), (1, LENGTH, FEATURES)),
    "take": lambda x, ids: x + ops.take(x, [3, 1, 0, 2], axis=0) / 2,
    "take along axis": lambda x, ids: x + ops.take_along_axis(x, ids[..., None] % LENGTH, axis=1),
    "gather_nd": lambda x, ids: x + tf.gather_nd(x, [[3, 5], [2, 7], [1, 0], [0, 9]])[:, None],
    "scatter": lambda x, ids: x + ops.scatter([[3], [2], [1], [0]], sums(x), (BATCH, FEATURES))[0],
    "tensor_scatter_nd_add": lambda x, ids: tf.tensor_scatter_nd_add(x, [[0], [3]], x[1:3]),
    # shapes
    "reshape": lambda x, ids: ops.reshape(ops.reshape(x, (-1, 64))[::-1], x.shape),
    "split": lambda x, ids: ops.concatenate(ops.split(x, 2, axis=-1)[::-1], -1),
    "split rows": lambda x, ids: ops.concatenate(ops.split(x, BATCH)[::-1]),
    "shift rows": lambda x, ids: x + ops.concatenate([x[1:], x[:1]]) / 2,
    "pad": lambda x, ids: x + ops.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))),
    "pad rows": lambda x, ids: x + ops.pad(x, ((1, 0), (0, 0), (0, 0)))[1:],
    "tile": lambda x, ids: x + ops.tile(x[:2], (2, 1, 1)),
    "repeat": lambda x, ids: ops.reshape(ops.repeat(x, 2, axis=0), (BATCH, 2, LENGTH, -1))[:, 0],
    "stack": lambda x, ids: ops.sum(ops.stack([x, 2 * x], 1), 1),
    "unstack": lambda x, ids: ops.stack(ops.unstack(x, axis=2), 2),
    "roll": lambda x, ids: x + ops.roll(x, 1, axis=1),
    "flip": lambda x, ids: x + ops.flip(x, 1),
    # conditions
    "where": lambda x, ids: ops.where((ids > 50)[..., None], x, -x),
    "where with a scalar": lambda x, ids: ops.where(ops.mean(x) > 0, x, -x),
    "where with a bool": lambda x, ids: tf.where(True, x, -x),
    "cond": lambda x, ids: ops.cond(ops.mean(x) > 0, lambda: x, lambda: 2 * x),
    "switch": lambda x, ids: ops.switch(1, [lambda x: x, lambda x: 2 * x], x),
    "while loop": lambda x, ids: ops.fori_loop(0, 3, lambda i, y: y / 2, x),
    "scan": lambda x, ids: scan(x),
    "boolean_mask": lambda x, ids: x + ops.sum(tf.boolean_mask(x, ids > 3)) / 1e4,
    # reductions and orders
    "cumsum": lambda x, ids: ops.cumsum(x, axis=1) / LENGTH,
    "cumsum of rows": lambda x, ids: x + ops.cumsum(x, axis=0) / BATCH,
    "cumsum of features": lambda x, ids: ops.cumsum(x, axis=-1) / FEATURES,
    "max of rows": lambda x, ids: x - ops.max(x, axis=0, keepdims=True),
    "prod": lambda x, ids: x + ops.prod(1 + x, axis=-1, keepdims=True),
    "std of rows": lambda x, ids: x / (1 + ops.std(x, axis=0, keepdims=True)),
    "logsumexp": lambda x, ids: x - ops.logsumexp(x, axis=-1, keepdims=True),
    "softmax of rows": lambda x, ids: x * ops.softmax(x, axis=0),
    "argmax": lambda x, ids: x * ops.cast(ops.argmax(x, -1), "float32")[..., None] / FEATURES,
    "argmin": lambda x, ids: x * ops.cast(ops.argmin(x, -1), "float32")[..., None] / FEATURES,
    "top_k": lambda x, ids: ops.where(x >= ops.top_k(x, 8)[0][..., -1:], x, 0.0),
    "sort": lambda x, ids: x + ops.sort(x, axis=1),
    "sort of rows": lambda x, ids: x + ops.sort(x, axis=0),
    "one_hot": lambda x, ids: x + ops.one_hot(ids, VOCAB_SIZE) @ ops.ones((VOCAB_SIZE, 1)),
    "bincount": lambda x, ids: x + ops.mean(ops.bincount(ids, minlength=VOCAB_SIZE), -1)[:1, None],
    "segment_sum": lambda x, ids: x + ops.segment_sum(sums(x), ids[:, 0] % 2, 2)[:1] / LENGTH,
    "searchsorted": lambda x, ids: (
        x * ops.cast(ops.searchsorted(ops.arange(9), ids[0])[0], "float32")
    ),
    # matrices
    "contrast": lambda x, ids: x + (ops.softmax(similarity(x)) @ sums(x))[:, None] / LENGTH,
    "transposed softmax": lambda x, ids: x + ops.softmax(similarity(x), axis=0)[..., :1, None],
    "diagonal": lambda x, ids: x + ops.diagonal(similarity(x))[:, None, None] / LENGTH,
    "eye": lambda x, ids: x + (similarity(x) * ops.eye(BATCH))[..., :1, None] / LENGTH,
    "inverse": lambda x, ids: x + ops.inv(similarity(x) + 9 * ops.eye(BATCH))[..., :1, None],
    "fft2": lambda x, ids: ops.fft2((x, ops.zeros_like(x)))[0] / LENGTH,
    "norm": lambda x, ids: x / (1 + ops.norm(x, axis=-1, keepdims=True)),
    "clip_by_norm": lambda x, ids: tf.clip_by_norm(x, 3.0),
    # random numbers
    "tf.random": lambda x, ids: x + 0 * tf.random.normal(x.shape),
}
LAYERS = {
    "BatchNormalization": keras.layers.BatchNormalization,
    "GroupNormalization": lambda: keras.layers.GroupNormalization(4),
    "UnitNormalization": keras.layers.UnitNormalization,
    "Conv1D": lambda: keras.layers.Conv1D(FEATURES, 3, padding="same"),
    "DepthwiseConv1D": lambda: keras.layers.DepthwiseConv1D(3, padding="same"),
    "MaxPooling1D": lambda: keras.layers.MaxPooling1D(3, 1, padding="same"),
    "AveragePooling1D": lambda: keras.layers.AveragePooling1D(3, 1, padding="same"),
    "LSTM": lambda: keras.layers.LSTM(FEATURES, return_sequences=True),
    "GRU": lambda: keras.layers.GRU(FEATURES, return_sequences=True),
}


class Operation(keras.layers.Layer):
    """Layer that computes an operation of `OPERATIONS`."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def call(self, x, ids):
        return ops.reshape(self.compute(x, ids), x.shape)

    def compute_output_spec(self, x, ids):
        return keras.KerasTensor(x.shape, x.dtype)


def train(name, data, model):
    """Return the losses of a model with an operation, on `data` × `model` devices."""
    config = dtransformer.TransformerOpParallelConfig(data_parallel=data, model_parallel=model)
    dtransformer.init(config, local_devices=data * model)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), batch_size=BATCH, dtype="int32")
    x = keras.layers.Dense(FEATURES)(keras.layers.Embedding(VOCAB_SIZE, FEATURES)(inputs))
    if name in LAYERS:
        x = LAYERS[name]()(x)
    else:
        x = Operation(OPERATIONS[name])(x, inputs)
    network = keras.Model(inputs, keras.layers.Dense(VOCAB_SIZE)(x))
    trainer = Trainer(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile(keras.optimizers.SGD(1.0), loss)
    ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, (BATCH, LENGTH), "int32")
    return [float(trainer.train_on_batch(ids, ids)) for _ in range(STEPS)]


def _run(connection, *args):
    try:
        connection.send({"losses": train(*args)})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def train_in_process(*args):
    """Return a dict with the losses, the error, or the exit code of a process without results."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(sender, *args))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else {"exit": "timeout"}
    except EOFError:
        process.join()
        return {"exit": process.exitcode}
    finally:
        process.kill()
        process.join()


def compare(name, data, model):
    """Return an entry of the report for an operation."""
    entry = {"operation": name}
    expected = train_in_process(name, 1, 1)
    if "losses" not in expected:
        return {**entry, **expected, "result": "fails on one device"}
    received = train_in_process(name, data, model)
    if "exit" in received:
        return {**entry, **received, "result": "ends the process"}
    if "error" in received:
        return {**entry, **received, "result": "error"}
    differences = np.subtract(received["losses"], expected["losses"])
    entry["difference"] = float(np.max(np.abs(differences / expected["losses"])))
    return {**entry, "result": "equal" if entry["difference"] <= PARITY_LOSS else "differs"}


def main():
    names = [*OPERATIONS, *LAYERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", nargs="+", choices=names, default=names)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--model", type=int, default=2)
    arguments = parser.parse_args()
    entries = []
    for name in arguments.operations:
        entries.append(compare(name, arguments.data, arguments.model))
        print(json.dumps(entries[-1]), flush=True)
    sys.exit(any(entry["result"] not in ("equal", "error") for entry in entries))


if __name__ == "__main__":
    main()
