"""Measure the peak memory and the time of a training step and print JSON.

    python benchmarks/memory.py
    python benchmarks/memory.py --cases whole,recompute --layers 12 --batch_size 32
    python benchmarks/memory.py --cases level0,level1,level2,level3 --hidden_size 768 --batch_size 4
    python benchmarks/memory.py --cases level0_of_4,level3_of_4 --budget_mb 700

Each case runs in fresh processes. Results of rank 0:

- `activation_bytes`: peak resident memory, minus the peak of processes that compile the same step
  but train on very few tokens
- `training_bytes`: increase of the peak resident memory since before the model was created
- `tensor_bytes`: peak of TensorFlow's allocator in a step, above the memory before the step

`--budget_mb` limits the memory of each rank for model and training. A case that needs more has
`"fits": false`.
"""

import argparse
import json
import statistics
import sys
import time

import paths  # noqa: F401

from harness.launch import launch, tail
from harness.measure import limit_memory, passing_bytes, peak_bytes, translation_trainer
from harness.printed import json_with

# Name -> (number of ranks, fields of the parallel config).
CASES = {
    "whole": (1, {}),
    "micro_batches_2": (1, {"micro_batch_num": 2}),
    "micro_batches_4": (1, {"micro_batch_num": 4}),
    "micro_batches_8": (1, {"micro_batch_num": 8}),
    "recompute": (1, {"recompute": True}),
    "recompute_attention": (1, {"recompute": {"select": ("attention",)}}),
    **{f"level{level}": (2, {"optimizer_shard": level}) for level in range(4)},
    **{f"level{level}_of_4": (4, {"optimizer_shard": level}) for level in range(4)},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="whole,recompute", help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument(
        "--layers", type=int, default=4, help="layers of the encoder and of the decoder"
    )
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--batch_size", type=int, default=64, help="sentences on each rank")
    parser.add_argument("--length", type=int, default=64, help="tokens on each side")
    parser.add_argument(
        "--budget_mb", type=int, help="memory limit of each rank for model and training"
    )
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--few_tokens", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train one case on this rank. Rank 0 prints memory and time."""
    import numpy as np
    import tensorflow as tf

    import dtransformer

    fields = dict(CASES[args.worker][1])
    if isinstance(fields.get("recompute"), dict):
        fields["recompute"] = dtransformer.TransformerRecomputeConfig(**fields["recompute"])
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**fields))
    tf.matmul(tf.ones([256, 256]), tf.ones([256, 256])).numpy()  # TensorFlow starts its threads.
    empty = peak_bytes()
    if args.budget_mb:
        limit_memory(args.budget_mb * 2**20)
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    rng = np.random.default_rng(0)

    def step(rows, length):
        ids = rng.integers(4, args.vocab_size, (rows, length), "int32")
        start = time.perf_counter()
        trainer.train_on_batch({"source": ids, "target": ids}, ids, shard=False)
        return time.perf_counter() - start

    if args.few_tokens:  # Everything except for activations has the same size.
        rows, length = fields.get("micro_batch_num", 1), 4
    else:
        rows, length = args.batch_size, args.length
    seconds = [step(rows, length) for _ in range(args.steps + 1)][1:]
    result = {
        "tensor_bytes": passing_bytes(lambda: step(rows, length)),
        "training_bytes": peak_bytes() - empty,
        "peak_bytes": peak_bytes(),
        "seconds_per_step": statistics.median(seconds),
        "parameters": trainer.network.count_params(),
    }
    shape = tf.TensorSpec([args.batch_size, args.length])
    report = trainer.memory_report({"source": shape, "target": shape})
    for row in report.rows:
        result[row.what] = {"planned": row.planned, "measured": row.measured}
    if dtransformer.is_chief():
        print(json.dumps(result), flush=True)
    dtransformer.shutdown()


def run(case, arguments, budget):
    """Run the processes of a case and return the JSON that rank 0 prints."""
    result = start(case, arguments, budget)
    if result["fits"]:
        few = start(case, [*arguments, "--few_tokens"], budget)
        activation_bytes = result["peak_bytes"] - few["peak_bytes"]
        return {"fits": True, "activation_bytes": activation_bytes, **result}
    return result


def start(case, arguments, budget):
    num_ranks = CASES[case][0]
    environment = {"MALLOC_ARENA_MAX": "2"} if budget else None
    completed = launch(num_ranks, [__file__, *arguments, "--worker", case], 1200, environment)
    result = json_with("peak_bytes", completed.stdout)
    if result and not completed.returncode:
        return {"fits": True, **result}
    if budget:
        words = ("bad_alloc", "allocat", "OOM", "ResourceExhausted", "MemoryError")
        error_lines = [
            line for line in completed.stderr.splitlines() if any(word in line for word in words)
        ]
        return {
            "fits": False,
            "exit": completed.returncode,
            "said": error_lines[-1:] or completed.stderr[-500:],
        }
    sys.exit(f"{case} failed:\n{tail(completed.stdout, completed.stderr)}")


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    report = {"options": {k: v for k, v in vars(args).items() if k not in ("worker", "cases")}}
    report["cases"] = {}
    for case in args.cases.split(","):
        report["cases"][case] = run(case, sys.argv[1:], args.budget_mb)
        print(case, report["cases"][case], file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
