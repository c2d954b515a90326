"""Compare blockwise attention with attention that stores all scores and print JSON.

    python benchmarks/attention.py [--rounds 5] [--lengths 2048,4096,8192]

`time` has the ratios between the seconds of the forward and backward pass, with 8 heads of 64 features.
Both implementations take turns in each round. `memory` is the peak of a training step of a translation
model with one encoder and one decoder block, minus the peak for four tokens, each in a fresh process.
`growth` is the ratio for twice the length.
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

# (length, batch size, whether attention is causal).
SHAPES = ((128, 16, False), (512, 4, True), (1024, 2, True), (2048, 1, True), (2048, 1, False))
HEADS, FEATURES = 8, 64


def make_timer(implementation, length, rows, causal):
    """Return a function that runs the forward and backward pass and returns the seconds."""
    import tensorflow as tf

    from dtransformer.layers.attention_core import attention

    tensors = [
        tf.random.stateless_normal((rows, HEADS, length, FEATURES), [0, i]) for i in range(4)
    ]

    @tf.function
    def run(q, k, v, upstream):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            context = attention(q, k, v, causal=causal, implementation=implementation)
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
        timers = {
            implementation: make_timer(implementation, length, rows, causal)
            for implementation in ("reference", "blockwise")
        }
        seconds = {implementation: [] for implementation in timers}
        for _ in range(rounds):
            for implementation, timed in timers.items():
                seconds[implementation].append(timed())
        ratios = [
            blockwise / reference
            for reference, blockwise in zip(seconds["reference"], seconds["blockwise"])
        ]
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
    """Train two steps on one sequence and print the peak memory of the process."""
    import numpy as np

    trainer = translation_trainer(100, hidden_size, 1)
    ids = np.random.default_rng(0).integers(4, 100, (1, length), "int32")
    for _ in range(2):
        trainer.train_on_batch({"source": ids, "target": ids}, ids)
    print(json.dumps({"peak": peak_bytes()}))


def memory_report(lengths, hidden_size):
    peaks = {length: measure_peak(length, hidden_size) for length in (4, *lengths)}
    increases = {length: peaks[length] - peaks[4] for length in lengths}
    return {
        "megabytes": {length: round(num_bytes / 2**20) for length, num_bytes in increases.items()},
        "growth": [round(increases[y] / increases[x], 2) for x, y in itertools.pairwise(lengths)],
    }


def measure_peak(length, hidden_size):
    command = [sys.executable, __file__, "--worker", str(length), "--hidden_size", str(hidden_size)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
    return json.loads(completed.stdout.splitlines()[-1])["peak"]


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
