"""Measure the peak memory and the time of a training step; print JSON.

    python benchmarks/memory.py
    python benchmarks/memory.py --cases whole,micro_batches_8 --layers 12 --batch_size 32

Each case runs in a process of its own. `activation_bytes` is the peak resident memory
above that of a step with hardly any tokens.
"""

import argparse
import json
import resource
import statistics
import sys
import time

from workload import output_lines, translation_trainer

# Name -> fields of the parallel config.
CASES = {
    "whole": {},
    "micro_batches_2": {"micro_batch_num": 2},
    "micro_batches_4": {"micro_batch_num": 4},
    "micro_batches_8": {"micro_batch_num": 8},
    "recompute": {"recompute": True},
    "recompute_attention": {"recompute": {"select": ("attention",)}},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, and of the decoder")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of each side")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train with one case; print what it takes."""
    import numpy as np

    import dtransformer

    fields = dict(CASES[args.worker])
    if isinstance(fields.get("recompute"), dict):
        fields["recompute"] = dtransformer.TransformerRecomputeConfig(**fields["recompute"])
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**fields))
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    rng = np.random.default_rng(0)

    def step(rows, length):
        ids = rng.integers(4, args.vocab_size, (rows, length), "int32")
        start = time.perf_counter()
        trainer.train_on_batch({"source": ids, "target": ids}, ids)
        return time.perf_counter() - start

    # One row a micro-batch: all but the activations is there.
    step(CASES[args.worker].get("micro_batch_num", 1), 4)
    without_activations = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = [step(args.batch_size, args.length) for _ in range(args.steps + 1)][1:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "activation_bytes": peak - without_activations,
                "peak_bytes": peak,
                "seconds_per_step": statistics.median(seconds),
            }
        )
    )


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    report = {"options": {k: v for k, v in vars(args).items() if k not in ("worker", "cases")}}
    report["cases"] = {}
    for case in args.cases.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", case]
        lines = output_lines(case, command, timeout=1200)
        report["cases"][case] = json.loads(lines[-1])
        print(case, report["cases"][case], file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
