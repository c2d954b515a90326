"""Measure the seconds of the first step by depth, and of a second shape, and print JSON.

    python benchmarks/start.py
    python benchmarks/start.py --layouts one_device,mesh --blocks 4,12 --rounds 3

`fit` trains a language model on a dataset of two batches of different lengths. Layouts and depths take
turns in fresh processes. `ratio` divides the first step of the deepest network by the first step of
the shallowest network in the same round. `second_shape` is the step with the second length.
"""

import argparse
import json
import statistics
import sys
import time

import paths  # noqa: F401

from harness.printed import printed_json

# Name -> (ranks, local devices per rank, fields of the parallel config).
LAYOUTS = {
    "one_device": (1, 1, {}),
    "mesh": (1, 2, {"model_parallel": 2}),
    "mesh_in_chunks": (1, 2, {"model_parallel": 2, "pipeline_schedule": "interleaved"}),
    "stages": (2, 1, {"pipeline_stage": 2, "micro_batch_num": 4}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, separated by commas")
    parser.add_argument("--blocks", default="4,48", help="depths, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train two steps on this rank. Rank 0 prints the seconds of each."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import CausalLM
    from dtransformer.trainers import Trainer

    layout, blocks = args.worker.split(":")
    _, local_devices, fields = LAYOUTS[layout]
    if layout == "mesh_in_chunks":  # Each chunk has about four blocks.
        fields = fields | {"pipeline_chunks": int(blocks) // 4 + 1}
        fields = fields if int(blocks) > 4 else LAYOUTS["mesh"][2]
    dtransformer.init(
        dtransformer.TransformerOpParallelConfig(**fields), local_devices=local_devices
    )
    model = CausalLM(512, hidden_size=args.hidden_size, num_layers=int(blocks), max_length=64)
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-4), CrossEntropyLoss())
    random_generator = np.random.default_rng(0)
    batches = [
        random_generator.integers(4, 512, (8, length + 1)).astype("int32") for length in (32, 48)
    ]
    dataset = tf.data.Dataset.from_generator(
        lambda: ((ids[:, :-1], ids[:, 1:]) for ids in batches),
        output_signature=(tf.TensorSpec([8, None], "int32"),) * 2,
    )
    moments = [time.perf_counter()]

    class Moments(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["loss"]  # This read waits for the step.
            moments.append(time.perf_counter())

    trainer.fit(dataset, callbacks=[Moments()], verbose=0)
    first, second = np.diff(moments)
    if dtransformer.is_chief():
        print(json.dumps({"first_step": first, "second_shape": second}), flush=True)
    dtransformer.shutdown()


def main():
    args = parse_arguments()
    if args.worker is not None:
        return work(args)
    depths = [int(blocks) for blocks in args.blocks.split(",")]
    report = {"options": {"blocks": depths, "hidden_size": args.hidden_size}, "layouts": {}}
    layouts = args.layouts.split(",")
    rounds = {layout: {blocks: [] for blocks in depths} for layout in layouts}
    for _ in range(args.rounds):
        for layout, blocks in ((name, blocks) for name in layouts for blocks in depths):
            worker = f"{layout}:{blocks}"
            arguments = [__file__, *sys.argv[1:], "--worker", worker]
            result = printed_json(worker, LAYOUTS[layout][0], arguments, "first_step", timeout=900)
            rounds[layout][blocks].append(result)
            print(worker, result, file=sys.stderr)
    for layout, results in rounds.items():
        firsts = {b: [result["first_step"] for result in results[b]] for b in depths}
        ratios = [b / a for a, b in zip(firsts[depths[0]], firsts[depths[-1]])]
        report["layouts"][layout] = {
            "first_step": firsts,
            "second_shape": {b: [result["second_shape"] for result in results[b]] for b in depths},
            "ratio": ratios,
            "ratio_median": statistics.median(ratios),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
