"""Measure the cost of fixed sparse attention by sequence length and print JSON.

    python benchmarks/sparse_attention.py [--rounds 5] [--lengths 1024,4096,16384]

Times the forward and backward pass with 4 heads of 32 features in one process:

- `windows`: blocks of a fixed size in which all positions are global
- `roots`: windows of √s positions with one global position
- `dense`: blockwise attention with a causal mask, up to 4,096 positions

The variants take turns in each round. Prints the median seconds, the growth between lengths, and the
average number of keys that a query sees.
"""

import argparse
import itertools
import json
import math
import statistics
import time

import paths  # noqa: F401
import tensorflow as tf

from dtransformer.layers import FixedSparseAttention
from dtransformer.layers.attention_core import attention

HEADS, FEATURES = 4, 32
LONGEST_DENSE = 4096


def sparse(length, block_size, global_size):
    """Return the layer and the average number of keys that a query sees."""
    layer = FixedSparseAttention(
        HEADS, FEATURES, block_size, seq_length=length, global_size=global_size
    )
    pattern = layer.pattern
    local_keys, global_windows = (pattern.window + 1) / 2, (pattern.num_windows - 1) / 2
    return layer, local_keys + global_windows * pattern.global_size


def dense(q, k, v):
    heads = [tf.transpose(tf.reshape(x, [1, -1, HEADS, FEATURES]), [0, 2, 1, 3]) for x in (q, k, v)]
    context = attention(*heads, causal=True, implementation="blockwise")
    return tf.reshape(tf.transpose(context, [0, 2, 1, 3]), q.shape)


def make_timer(function, length):
    """Return a function that runs the forward and backward pass and returns the seconds."""
    shape = (1, length, HEADS * FEATURES)
    tensors = [tf.random.stateless_normal(shape, [0, i]) for i in range(4)]

    @tf.function
    def run(q, k, v, upstream):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            context = function(q, k, v)
        return tape.gradient(context, [q, k, v], upstream)

    def seconds():
        start = time.perf_counter()
        run(*tensors)[0].numpy()
        return time.perf_counter() - start

    seconds()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--block_size", type=int, default=32)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    variants = {}
    for length in lengths:
        variants["windows", length] = sparse(length, args.block_size, None)
        variants["roots", length] = sparse(length, math.isqrt(length) // 4, 1)
        if length <= LONGEST_DENSE:
            variants["dense", length] = dense, (length + 1) / 2
    runs = {key: make_timer(function, key[1]) for key, (function, _) in variants.items()}
    seconds = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            seconds[key].append(run())
    report = {}
    for variant in ("windows", "roots", "dense"):
        medians = {
            n: statistics.median(seconds[variant, n]) for n in lengths if (variant, n) in runs
        }
        report[variant] = {
            "seconds": {n: round(x, 4) for n, x in medians.items()},
            "growth": [round(y / x, 2) for x, y in itertools.pairwise(medians.values())],
            "keys_of_a_query": {n: round(variants[variant, n][1], 1) for n in medians},
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
