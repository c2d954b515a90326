"""Measure memory and time of long sequences that are sharded over ranks; print JSON.

    python benchmarks/long_context.py
    python benchmarks/long_context.py --ranks 1,2,4 --modes ulysses,ring --length 8192
    python benchmarks/long_context.py --one_process --length 4096
    python benchmarks/long_context.py --budget_mb 600

Trains a language model on one row of `--length` tokens, on one rank and on several ranks with
`context_parallel`, each in fresh processes. Results of rank 0:

- `activation_bytes`: peak of TensorFlow's allocator in a step, above the memory before the step
- `share`: `activation_bytes` divided by the value of one rank
- `peak_bytes`: peak resident memory of the process
- `seconds_per_step`: median of the timed steps; all ranks share the cores of the machine
- `sent_bytes`: bytes that a device sends in a step

`--budget_mb` limits the memory of each rank for model and training, and `fits` is whether it suffices.
With `--one_process`, the shards are on devices of one process, and `activation_bytes` is its peak
divided by the number of devices.
"""

import argparse
import json
import statistics
import sys
import time

import paths  # noqa: F401

from harness.launch import launch, tail
from harness.measure import limit_memory, passing_bytes, peak_bytes
from harness.printed import json_with


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--modes", default="ulysses,all_gather,ring,ulysses_ring")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=1000)
    parser.add_argument("--one_process", action="store_true", help="devices instead of ranks")
    parser.add_argument(
        "--budget_mb", type=int, help="memory limit of each rank for model and training"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train on this rank. Rank 0 prints memory and time."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import CausalLM

    ranks, mode = args.worker.split(",")
    devices = int(ranks) if args.one_process else 1
    config = dtransformer.TransformerOpParallelConfig(
        context_parallel=int(ranks), context_parallel_mode=mode
    )
    dtransformer.init(config, local_devices=devices)
    tf.matmul(tf.ones([256, 256]), tf.ones([256, 256])).numpy()  # TensorFlow starts its threads.
    empty = peak_bytes()
    if args.budget_mb:
        limit_memory(args.budget_mb * 2**20)
    model = CausalLM(
        args.vocab_size,
        hidden_size=args.hidden_size,
        num_heads=8,
        num_layers=args.layers,
        dropout_rate=0.0,
        positions="rotary",
    )
    trainer = dtransformer.Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-4), CrossEntropyLoss())
    ids = np.random.default_rng(0).integers(4, args.vocab_size, (1, args.length + 1), "int32")
    seconds, losses = [], []
    for _ in range(args.steps + 1):
        start = time.perf_counter()
        logs = trainer.train_on_batch(ids[:, :-1], ids[:, 1:], shard=False, return_dict=True)
        seconds.append(time.perf_counter() - start)
        losses.append(float(logs["step_loss"]))
    tensor_bytes = passing_bytes(
        lambda: trainer.train_on_batch(ids[:, :-1], ids[:, 1:], shard=False)
    )
    report = trainer.memory_report(tf.TensorSpec([1, args.length]))
    result = {
        "activation_bytes": tensor_bytes // devices,
        "peak_bytes": peak_bytes(),
        "training_bytes": peak_bytes() - empty,
        "planned_activation_bytes": report.rows[-1].planned,
        "seconds_per_step": round(statistics.median(seconds[1:]), 2),
        "losses": losses,
    }
    if int(ranks) > 1:
        sent = trainer.communication_report().collectives
        result["sent_bytes"] = sum(c.bytes_sent for c in sent)
    if dtransformer.is_chief():
        print(json.dumps(result), flush=True)
    dtransformer.shutdown()


def run(case, arguments, budget, one_process):
    """Run the processes of a case and return the JSON that rank 0 prints."""
    ranks = 1 if one_process else int(case.split(",")[0])
    environment = {"MALLOC_ARENA_MAX": "2"} if budget else None
    completed = launch(ranks, [__file__, *arguments, "--worker", case], 1200, environment)
    result = json_with("peak_bytes", completed.stdout)
    if result and not completed.returncode:
        return {"fits": True, **result}
    if budget:
        return {"fits": False, "exit": completed.returncode}
    sys.exit(f"{case} failed:\n{tail(completed.stdout, completed.stderr)}")


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    report = {"options": {k: v for k, v in vars(args).items() if k != "worker"}, "cases": {}}
    first_result = None
    for ranks in args.ranks.split(","):
        for mode in args.modes.split(",") if int(ranks) > 1 else ["auto"]:
            result = run(f"{ranks},{mode}", sys.argv[1:], args.budget_mb, args.one_process)
            first_result = first_result or result
            if "activation_bytes" in result and "activation_bytes" in first_result:
                share = result["activation_bytes"] / first_result["activation_bytes"]
                result["share"] = round(share, 3)
            report["cases"][f"{ranks} ranks, {mode}" if int(ranks) > 1 else "1 rank"] = result
            print(ranks, mode, result, file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
