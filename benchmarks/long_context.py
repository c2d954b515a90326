"""Measure what long sequences take when they are sharded over ranks; print JSON.

    python benchmarks/long_context.py
    python benchmarks/long_context.py --ranks 1,2,4 --modes ulysses,ring --length 8192
    python benchmarks/long_context.py --one_process --length 4096
    python benchmarks/long_context.py --budget_mb 600

Trains a language model on one row of `--length` tokens, on one rank and with `context_parallel` on
several, each in processes of its own. `activation_bytes` is the peak of TensorFlow's allocator in a
step, above what stays, of rank 0; `share` is that by one rank's; `peak_bytes` is all of its process;
`seconds_per_step` the median of the timed steps, in which all ranks share the machine's cores;
`sent_bytes` what a device sends in a step. With `--budget_mb` no rank may take more for model and
training: `fits` says whether that is enough. With `--one_process` shards are on devices of one
process, and `activation_bytes` is its peak by their number.
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
    parser.add_argument("--modes", default="ulysses,all_gather,ring")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=1000)
    parser.add_argument("--one_process", action="store_true", help="devices instead of ranks")
    parser.add_argument("--budget_mb", type=int, help="of each rank, for model and training")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train on this rank; rank 0 prints what it takes."""
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
    tf.matmul(tf.ones([256, 256]), tf.ones([256, 256])).numpy()  # TensorFlow has its threads now
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
    """Run the processes of a case; return what rank 0 printed."""
    ranks = 1 if one_process else int(case.split(",")[0])
    environment = {"MALLOC_ARENA_MAX": "2"} if budget else None
    done = launch(ranks, [__file__, *arguments, "--worker", case], 1200, environment)
    result = json_with("peak_bytes", done.stdout)
    if result and not done.returncode:
        return {"fits": True, **result}
    if budget:
        return {"fits": False, "exit": done.returncode}
    sys.exit(f"{case} failed:\n{tail(done.stdout, done.stderr)}")


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    report = {"options": {k: v for k, v in vars(args).items() if k != "worker"}, "cases": {}}
    first = None
    for ranks in args.ranks.split(","):
        for mode in args.modes.split(",") if int(ranks) > 1 else ["auto"]:
            found = run(f"{ranks},{mode}", sys.argv[1:], args.budget_mb, args.one_process)
            first = first or found
            if "activation_bytes" in found and "activation_bytes" in first:
                share = found["activation_bytes"] / first["activation_bytes"]
                found["share"] = round(share, 3)
            report["cases"][f"{ranks} ranks, {mode}" if int(ranks) > 1 else "1 rank"] = found
            print(ranks, mode, found, file=sys.stderr)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
