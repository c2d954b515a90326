"""Measure attention by blocks against attention that keeps all scores; print JSON.

    python benchmarks/attention.py [--rounds 5] [--lengths 2048,4096,8192]

`time` is that of forward and backward pass of the core, 8 heads of 64 features: in each round both
ways one after the other, and their ratio. `memory` is the peak of a training step of a translation
model with one block of each kind, above the process that sees four tokens, each in a process of its
own; `growth` is what twice the length takes more.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

import paths  # noqa: F401

from harness.measure import peak_bytes, translation_trainer

# Length, batch size, whether causal.
SHAPES = ((128, 16, False), (512, 4, True), (1024, 2, True), (2048, 1, True), (2048, 1, False))
HEADS, FEATURES = 8, 64


def seconds_of(implementation, length, rows, causal):
    """Return a function that computes forward and backward pass, and returns the seconds."""
    import tensorflow as tf

    from dtransformer.layers.attention_core import attention

    tensors = [
        tf.random.stateless_normal((rows, HEADS, length, FEATURES), [0, i]) for i in range(4)
    ]

    @tf.function
    def run(q, k, v, upstream):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            context = attention(q, [k], [v], causal=causal, implementation=implementation)
        return tape.gradient(context, [q, k, v], upstream)

    def timed():
        start = time.perf_counter()
        run(*tensors)[0].numpy()
        return time.perf_counter() - start

    timed()
    return timed


def time_report(rounds):
    reports = []
    for length, rows, causal in SHAPES:
        ways = {way: seconds_of(way, length, rows, causal) for way in ("reference", "blockwise")}
        seconds = {way: [] for way in ways}
        for _ in range(rounds):
            for way, timed in ways.items():
                seconds[way].append(timed())
        ratios = [own / whole for whole, own in zip(seconds["reference"], seconds["blockwise"])]
        reports.append(
            {
                "length": length,
                "rows": rows,
                "causal": causal,
                "ratios": [round(ratio, 3) for ratio in ratios],
                "median_ratio": round(statistics.median(ratios), 3),
            }
        )
    return reports


def work(length, hidden_size):
    """Train two steps of one sequence; print the peak of the process."""
    import numpy as np

    trainer = translation_trainer(100, hidden_size, 1)
    ids = np.random.default_rng(0).integers(4, 100, (1, length), "int32")
    for _ in range(2):
        trainer.train_on_batch({"source": ids, "target": ids}, ids)
    print(json.dumps({"peak": peak_bytes()}))


def memory_report(lengths, hidden_size):
    peaks = {length: peak_of(length, hidden_size) for length in (4, *lengths)}
    taken = {length: peaks[length] - peaks[4] for length in lengths}
    return {
        "megabytes": {length: round(number / 2**20) for length, number in taken.items()},
        "growth": [round(taken[y] / taken[x], 2) for x, y in itertools.pairwise(lengths)],
    }


def peak_of(length, hidden_size):
    command = [sys.executable, __file__, "--worker", str(length), "--hidden_size", str(hidden_size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
    return json.loads(done.stdout.splitlines()[-1])["peak"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.hidden_size)
    lengths = [int(length) for length in args.lengths.split(",")]
    report = {"time": time_report(args.rounds), "memory": memory_report(lengths, args.hidden_size)}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
