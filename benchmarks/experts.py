"""Compare the speed of a mixture of experts with a dense model of equal active FLOP.

    python benchmarks/experts.py [--experts 8] [--chosen 1] [--rounds 5] [--steps 5]

Both models train in one process on the same random tokens and take turns in each round, so that other
load on the machine affects both. Prints JSON: the speed ratio of each round and the median, tokens per
second, total and active parameters, FLOP of a step, and the fraction of dropped choices.
"""

import argparse
import json
import statistics
import time

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers import Trainer


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=1)
    parser.add_argument("--dropless", action="store_true")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps in each round")
    return parser.parse_args()


def make_trainer(args, moe_config=None, width=4):
    network = CausalLM(
        args.vocab_size,
        hidden_size=args.hidden_size,
        num_heads=8,
        ffn_hidden_size=width * args.hidden_size,
        num_layers=args.layers,
        max_length=args.length,
        moe_config=moe_config,
    )
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    return trainer


def measure_seconds(trainer, batch, steps):
    began = time.perf_counter()
    for _ in range(steps):
        trainer.train_on_batch(*batch)
    return time.perf_counter() - began


def main():
    args = parse_arguments()
    moe = dtransformer.MoEConfig(
        expert_num=args.experts,
        num_experts_chosen=args.chosen,
        capacity_factor=1.25,
        expert_group_size=args.length,
        dropless=args.dropless,
    )
    # The k experts of a token need as much FLOP as one feed-forward layer of k times the width.
    trainers = {
        "experts": make_trainer(args, moe),
        "dense": make_trainer(args, width=4 * args.chosen),
    }
    texts = np.random.default_rng(0).integers(4, args.vocab_size, (args.rows, args.length + 1))
    batch = texts[:, :-1].astype("int32"), texts[:, 1:].astype("int32")
    for trainer in trainers.values():  # Compile and warm up.
        measure_seconds(trainer, batch, 10)
    seconds = {name: [] for name in trainers}
    for round_index in range(args.rounds):
        order = list(trainers) if round_index % 2 else list(trainers)[::-1]
        for name in order:
            seconds[name].append(measure_seconds(trainers[name], batch, args.steps))
    ratios = [
        dense / experts for experts, dense in zip(seconds["experts"], seconds["dense"], strict=True)
    ]
    tokens = args.rows * args.length * args.steps
    report = {"ratio": statistics.median(ratios), "ratios": sorted(ratios)}
    for name, trainer in trainers.items():
        network = trainer.network
        report[name] = {
            "tokens_per_second": round(tokens / statistics.median(seconds[name])),
            "parameters": network.num_parameters(),
            "active_parameters": network.num_active_parameters(),
            "gflop_of_a_step": round(tokens_and_flops(network, *batch[:2])[1] / 1e9, 2),
        }
    layers = trainers["experts"].expert_load().layers
    report["dropped_share"] = round(float(np.mean([layer.dropped_share for layer in layers])), 3)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
