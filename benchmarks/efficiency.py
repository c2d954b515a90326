"""Compare the speed of layouts with one process on all cores and print JSON.

    python benchmarks/efficiency.py
    python benchmarks/efficiency.py --layouts mp2_devices,dp2 --rounds 3

Layouts take turns in fresh processes, so that other load on the machine slows all of them
equally. The result of a layout is its best round. Its efficiency is the ratio of its tokens
per second to the tokens per second of one process.
"""

import argparse
import json
import statistics
import sys
import time

import paths  # noqa: F401

from dtransformer.parallel.runtime import job
from harness.measure import translation_trainer
from harness.printed import printed_json

# Name -> (ranks, local devices per rank, fields of the parallel config).
LAYOUTS = {
    "one_process": (1, 1, {}),
    "mp2_devices": (1, 2, {"model_parallel": 2}),
    "mp2_ranks": (2, 1, {"model_parallel": 2}),
    "dp2": (2, 1, {}),
    "dp2_shard1": (2, 1, {"optimizer_shard": 1}),
    "dp2_shard2": (2, 1, {"optimizer_shard": 2}),
    "dp2_shard3": (2, 1, {"optimizer_shard": 3}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps in each round")
    parser.add_argument(
        "--layers", type=int, default=2, help="layers of the encoder and of the decoder"
    )
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument(
        "--batch_size", type=int, default=64, help="sentences on all ranks together"
    )
    parser.add_argument("--length", type=int, default=32, help="tokens on each side")
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--whole_tables", action="store_true", help="vocab_emb_dp=True")
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train with one layout on this rank. Rank 0 prints the seconds of every step."""
    import numpy as np

    import dtransformer

    _, local_devices, fields = LAYOUTS[args.worker]
    config = dtransformer.TransformerOpParallelConfig(
        **fields,
        sequence_parallel=args.sequence_parallel,
        vocab_emb_dp=args.whole_tables,
    )
    dtransformer.init(config, local_devices=local_devices)
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    trainer.network.build()
    index, count = job.data_shard()
    shape = (args.batch_size, args.length)
    ids = np.random.default_rng(0).integers(4, args.vocab_size, shape, "int32")[index::count]
    seconds = []
    for _ in range(args.steps + 2):  # The first two steps compile.
        start = time.perf_counter()
        trainer.train_on_batch({"source": ids, "target": ids}, ids, shard=False)
        seconds.append(time.perf_counter() - start)
    if dtransformer.is_chief():
        print(json.dumps({"step_seconds": seconds[2:], "first_step_seconds": seconds[0]}))
    dtransformer.shutdown()


def launch(layout, arguments):
    """Run the ranks of a layout and return the JSON that rank 0 prints."""
    num_ranks = LAYOUTS[layout][0]
    arguments = [__file__, *arguments, "--worker", layout]
    return printed_json(layout, num_ranks, arguments, "step_seconds", timeout=900)


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    layouts = args.layouts.split(",")
    layouts = list(dict.fromkeys(["one_process", *layouts]))
    rounds = {layout: [] for layout in layouts}
    for _ in range(args.rounds):
        for layout in layouts:
            result = launch(layout, sys.argv[1:])
            rounds[layout].append(statistics.median(result["step_seconds"]))
            print(f"{layout}: {rounds[layout][-1]:.3f} s per step", file=sys.stderr)
    tokens = 2 * args.batch_size * args.length
    best = {layout: min(seconds) for layout, seconds in rounds.items()}
    report = {
        "tokens_per_step": tokens,
        "options": {k: v for k, v in vars(args).items() if k not in ("worker", "layouts")},
        "layouts": {
            layout: {
                "seconds_per_step": rounds[layout],
                "tokens_per_second": tokens / best[layout],
                "efficiency": best["one_process"] / best[layout],
            }
            for layout in layouts
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
