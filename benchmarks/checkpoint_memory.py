"""Measure the memory for restoring a checkpoint and print JSON.

    python benchmarks/checkpoint_memory.py
    python benchmarks/checkpoint_memory.py --cases 'alone,mp2' --layers 2

One process saves a network of 200 million parameters with AdamW's states. Then the job of each case
restores it:

- `share_bytes`: size of the weights and states of a rank
- `tensor_bytes`: peak of additional memory from TensorFlow's allocator during the restore
- `peak_bytes`: increase of the peak resident memory while a rank creates the trainer and restores,
  including memory that the allocator keeps
"""

import argparse
import json
import math
import pathlib
import sys
import tempfile
import time

import paths  # noqa: F401

from dtransformer.parallel.weights.sharded_variable import get_local_shards
from harness.measure import passing_bytes, peak_bytes, translation_trainer
from harness.printed import run_programs

# Name -> (number of ranks, fields of the parallel config).
CASES = {
    "alone": (1, {}),
    "dp2": (2, {}),
    "mp2": (2, {"model_parallel": 2}),
    "pp2": (2, {"pipeline_stage": 2, "micro_batch_num": 2}),
    "shard1": (2, {"optimizer_shard": 1}),
    "shard3": (2, {"optimizer_shard": 3}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", default="alone,mp2,pp2,shard1,shard3", help="names, separated by commas"
    )
    parser.add_argument(
        "--layers", type=int, default=6, help="layers of the encoder and of the decoder"
    )
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=12000)
    parser.add_argument("--worker", choices=["save", *CASES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    import dtransformer
    from dtransformer.trainers.checkpoint import Checkpoint

    fields = {} if args.worker == "save" else CASES[args.worker][1]
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**fields))
    empty, start = peak_bytes(), time.perf_counter()
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    path = pathlib.Path(args.folder) / "saved"
    if args.worker == "save":
        trainer.network.build()
        trainer.save(path)
        report = {"peak_bytes": peak_bytes(), "parameters": trainer.network.count_params()}
        print(json.dumps(report))
        return
    trainer.network.build()
    trainer.training_state()
    built = time.perf_counter()
    result_bytes = peak_bytes() - empty
    tensor_bytes = passing_bytes(lambda: trainer.restore(path))
    restored = peak_bytes()
    shards = get_local_shards(trainer.network.variables) + trainer.optimizer.variables
    tensors = Checkpoint(path).manifest["tensors"]
    if dtransformer.is_chief():
        report = {
            "tensor_bytes": tensor_bytes,
            "peak_bytes": restored - empty,
            "peak_bytes_before_restoring": result_bytes,
            "share_bytes": sum(shard.numpy().nbytes for shard in shards),
            "largest_tensor_bytes": 4 * max(math.prod(shape) for shape, _ in tensors.values()),
            "seconds_to_make": built - start,
            "seconds_to_restore": time.perf_counter() - built,
        }
        print(json.dumps(report), flush=True)
    dtransformer.shutdown()


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    options = {k: v for k, v in vars(args).items() if k not in ("worker", "folder", "cases")}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [__file__, *sys.argv[1:], "--folder", folder, "--worker"]
        programs = {"save": (1, [*arguments, "save"])}
        for case in args.cases.split(","):
            programs[case] = CASES[case][0], [*arguments, case]
        report = run_programs(options, "cases", programs, '"peak_bytes"', 1200)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
