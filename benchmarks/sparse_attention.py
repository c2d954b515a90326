"""Measure how the cost of fixed sparse attention grows with the length; print JSON.

    python benchmarks/sparse_attention.py [--rounds 5] [--lengths 1024,4096,16384]

Forward and backward pass, 4 heads of 32 features, on one process. `windows`: blocks of a fixed size, of
which all is global; `roots`: windows of √s positions, of which one is global; `dense`: all scores of
a causal mask, by blocks, up to 4,096 positions. Of each the median of the rounds, in which all take
turns, what four times the length takes more, and how many keys a query sees on average.
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
    """Return the layer, and how many keys a query sees."""
    layer = FixedSparseAttention(
        HEADS, FEATURES, block_size, seq_length=length, global_size=global_size
    )
    pattern = layer.pattern
    own, before = (pattern.window + 1) / 2, (pattern.num_windows - 1) / 2
    return layer, own + before * pattern.global_size


def dense(q, k, v):
    heads = [tf.transpose(tf.reshape(x, [1, -1, HEADS, FEATURES]), [0, 2, 1, 3]) for x in (q, k, v)]
    context = attention(heads[0], [heads[1]], [heads[2]], causal=True, implementation="blockwise")
    return tf.reshape(tf.transpose(context, [0, 2, 1, 3]), q.shape)


def timed(function, length):
    """Return a function that computes forward and backward pass, and returns the seconds."""
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
    ways = {}
    for length in lengths:
        ways["windows", length] = sparse(length, args.block_size, None)
        ways["roots", length] = sparse(length, math.isqrt(length) // 4, 1)
        if length <= LONGEST_DENSE:
            ways["dense", length] = dense, (length + 1) / 2
    runs = {key: timed(function, key[1]) for key, (function, _) in ways.items()}
    seconds = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            seconds[key].append(run())
    report = {}
    for way in ("windows", "roots", "dense"):
        of_lengths = {n: statistics.median(seconds[way, n]) for n in lengths if (way, n) in runs}
        report[way] = {
            "seconds": {n: round(x, 4) for n, x in of_lengths.items()},
            "growth": [round(y / x, 2) for x, y in itertools.pairwise(of_lengths.values())],
            "keys_of_a_query": {n: round(ways[way, n][1], 1) for n in of_lengths},
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
