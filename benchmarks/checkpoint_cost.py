"""Measure the cost of saving during training and print JSON.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --ranks 2 --optimizer_shard 2

Rounds of `--steps` steps with and without a save take turns in one run. `cost` is the median of
the ratio between the seconds of both rounds, minus 1.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import paths  # noqa: F401

from harness.measure import translation_trainer
from harness.printed import run_programs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--optimizer_shard", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50, help="steps in each round")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of rounds")
    parser.add_argument(
        "--layers", type=int, default=4, help="layers of the encoder and of the decoder"
    )
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument(
        "--batch_size", type=int, default=32, help="sentences on all ranks together"
    )
    parser.add_argument("--length", type=int, default=32, help="tokens on each side")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="folder for checkpoints (default: a temporary folder)")
    return parser.parse_args()


def work(args):
    import numpy as np

    import dtransformer
    from dtransformer.trainers.checkpoint import Checkpoint

    dtransformer.init(
        dtransformer.TransformerOpParallelConfig(optimizer_shard=args.optimizer_shard)
    )
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    rng = np.random.default_rng(dtransformer.rank())
    shape = args.batch_size // args.ranks, args.length
    ids = rng.integers(4, args.vocab_size, shape, "int32")
    path = pathlib.Path(args.folder) / "last"

    def steps(num_steps, saves):
        start = time.perf_counter()
        if saves:
            trainer.save(path, wait=False)
        for _ in range(num_steps):
            trainer.train_on_batch({"source": ids, "target": ids}, ids, shard=False)
        trainer.wait_until_saved()
        return time.perf_counter() - start

    steps(3, True)
    rounds = [(steps(args.steps, False), steps(args.steps, True)) for _ in range(args.pairs)]
    start = time.perf_counter()
    trainer.save(path)
    seconds = time.perf_counter() - start
    if dtransformer.is_chief():
        written = sum(row["bytes"] for row in Checkpoint(path).manifest["files"].values())
        costs = [saving / plain - 1 for plain, saving in rounds]
        print(
            json.dumps(
                {
                    "cost": statistics.median(costs),
                    "costs": costs,
                    "seconds_per_step": statistics.median(plain for plain, _ in rounds)
                    / args.steps,
                    "seconds_of_a_save_alone": seconds,
                    "bytes": written,
                    "parameters": trainer.network.count_params(),
                }
            ),
            flush=True,
        )
    dtransformer.shutdown()


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    options = {k: v for k, v in vars(args).items() if k not in ("worker", "folder")}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [__file__, *sys.argv[1:], "--folder", args.folder or folder, "--worker"]
        programs = {"saving": (args.ranks, arguments)}
        report = run_programs(options, "results", programs, '"cost"', 1200)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
