"""Training speed of one process, beside the products that it cannot do without.

An encoder-decoder with 4 + 4 layers, h=256, f=1024, 8 heads, V=8000, trained on
batches of 32 x (32 + 32) tokens with AdamW and dropout 0.1. Prints JSON.

    python benchmarks/single_process.py [--steps 20] [--jit-compile true]
"""

import argparse
import json
import os
import platform
import resource
import time

import keras
import numpy as np
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import TranslationTransformer
from dtransformer.reports.throughput import measured_peak
from dtransformer.trainers import Trainer

BATCH, LENGTH, VOCAB, HIDDEN, FFN, HEADS, LAYERS = 32, 32, 8000, 256, 1024, 8, 4


class Stopwatch(keras.callbacks.Callback):
    """Keeps the seconds of every step."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def make_trainer(jit_compile, precision):
    model = TranslationTransformer(
        VOCAB,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        ffn_hidden_size=FFN,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        positions="learned",
        max_source_length=LENGTH,
        max_target_length=LENGTH,
        dtype=precision,
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-4), CrossEntropyLoss(), jit_compile=jit_compile)
    return trainer


def batches():
    """One batch of full sentences, again and again."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, VOCAB, (3, BATCH, LENGTH)).astype("int32")
    inputs = {"source": ids[0], "target": ids[1]}
    return tf.data.Dataset.from_tensors((inputs, ids[2])).repeat()


def product_shapes():
    """Return the products of the forward pass: the plain ones, and attention's of all heads.

    Both are {(rows, inner, columns): number}.
    """
    tokens = BATCH * LENGTH
    square = LAYERS * 4 + LAYERS * 8  # projections of self and cross attention
    plain = {
        (tokens, HIDDEN, HIDDEN): square,
        (tokens, HIDDEN, FFN): 2 * LAYERS,
        (tokens, FFN, HIDDEN): 2 * LAYERS,
        (tokens, HIDDEN, VOCAB): 1,
    }
    head = HIDDEN // HEADS
    attentions = 3 * LAYERS
    batched = {(LENGTH, head, LENGTH): attentions, (LENGTH, LENGTH, head): attentions}
    return plain, batched


def seconds_of_products(repeats=5):
    """Return the seconds of one step's products alone, forward and both gradients."""
    plain, batched = product_shapes()
    total = 0.0
    for shapes, batch in ((plain, []), (batched, [BATCH * HEADS])):
        for (rows, inner, columns), number in shapes.items():
            x = tf.random.normal([*batch, rows, inner])
            w = tf.random.normal([*batch, inner, columns])
            y = tf.random.normal([*batch, rows, columns])

            @tf.function
            def products(x, w, y):
                forward = tf.matmul(x, w)
                return forward, tf.matmul(y, w, transpose_b=True), tf.matmul(x, y, transpose_a=True)

            products(x, w, y)
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                products(x, w, y)[0].numpy()
                times.append(time.perf_counter() - start)
            total += number * float(np.median(times))
    return total


def flops_of_products():
    plain, batched = product_shapes()
    count = sum(2 * m * k * n * number for (m, k, n), number in plain.items())
    count += sum(2 * m * k * n * number for (m, k, n), number in batched.items()) * BATCH * HEADS
    return 3.0 * count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jit-compile", choices=["auto", "true", "false"], default="auto")
    parser.add_argument("--precision", default="float32")
    arguments = parser.parse_args()
    jit_compile = {"auto": "auto", "true": True, "false": False}[arguments.jit_compile]
    trainer = make_trainer(jit_compile, arguments.precision)
    stopwatch = Stopwatch()
    products = [seconds_of_products()]
    trainer.fit(batches(), steps_per_epoch=arguments.steps, verbose=0, callbacks=[stopwatch])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    products.append(seconds_of_products())  # before and after: the machine may drift
    step = float(np.median(stopwatch.seconds[2:]))
    limit, flops, peak = float(np.mean(products)), flops_of_products(), measured_peak()
    result = {
        "workload": "4+4 layers, h=256, f=1024, V=8000, batch 32 x (32+32)",
        "parameters": trainer.network.count_params(),
        "precision": arguments.precision,
        "jit_compile": arguments.jit_compile,
        "tokens_per_second": round(2 * BATCH * LENGTH / step, 1),
        "step_ms": round(step * 1e3, 1),
        "gflops_per_second": round(flops / step / 1e9, 1),
        "products_ms": round(limit * 1e3, 1),
        "share_of_products_limit": round(limit / step, 3),
        "share_of_square_product_peak": round(flops / step / peak, 3),
        "peak_memory_mib": round(memory),
        "first_step_s": round(stopwatch.seconds[0], 1),
        "steps": arguments.steps,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "tensorflow": tf.__version__,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
