"""Compare planned and measured step times, memory and ranking of small jobs; print JSON.

    python benchmarks/planner.py
    python benchmarks/planner.py --layouts alone,dp2,mp2,pp2 --rounds 3

The benchmark measures the machine for each number of ranks, as `dtransformer plan --measure` does, in
turns with the layouts. `step_seconds` is the minimum over the steps of all rounds, because other load
on the machine only adds time. The machine's speeds are also the best ones. `memory_bytes` is the value
of `memory_report()` on the fullest rank. `ranking` is the fraction of layout pairs in the measured
order, among pairs whose step times differ by more than 10 %.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time

import paths  # noqa: F401

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from harness.printed import printed_json

LAYOUTS = {
    "alone": {},
    "dp2": {"data_parallel": 2},
    "dp2-level1": {"data_parallel": 2, "optimizer_shard": 1},
    "dp2-level2": {"data_parallel": 2, "optimizer_shard": 2},
    "dp2-level3": {"data_parallel": 2, "optimizer_shard": 3},
    "mp2": {"model_parallel": 2, "vocab_emb_dp": False},
    "pp2": {"pipeline_stage": 2, "micro_batch_num": 4},
    "pp4": {"pipeline_stage": 4, "micro_batch_num": 4},
    "dp4": {"data_parallel": 4},
    "dp2pp2": {"data_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
    "dp2mp2": {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": False},
}
FOUR_RANKS = ("dp4", "dp2pp2", "dp2mp2")
MEASURE = "measure"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts",
        default=",".join(n for n in LAYOUTS if n not in FOUR_RANKS),
        help="names, separated by commas",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=12, help="steps in each round, with two warm-up steps"
    )
    parser.add_argument("--kind", default="causal", choices=("causal", "translation"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16, help="texts in a global batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a text")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_config(name):
    return TransformerOpParallelConfig(**{"data_parallel": 1, **LAYOUTS[name]})


def count_ranks(name):
    config = make_config(name)
    return config.data_parallel * config.model_parallel * config.pipeline_stage


def make_network(args):
    from dtransformer.models import CausalLM, EncoderDecoderLM

    if args.kind == "translation":
        return EncoderDecoderLM(
            args.vocab_size,
            hidden_size=args.hidden_size,
            num_heads=8,
            encoder_layers=args.layers // 2,
            decoder_layers=args.layers // 2,
            max_length=args.length,
        )
    return CausalLM(
        args.vocab_size,
        hidden_size=args.hidden_size,
        num_heads=8,
        num_layers=args.layers,
        max_length=args.length,
        dropout_rate=0.1,
    )


def work(args):
    """Train with one layout on this rank, or measure the machine. Rank 0 prints the result."""
    import dtransformer

    if args.worker == MEASURE:
        from dtransformer.cli.measured_machine import measure_device, own_memory_gb

        report = dataclasses.asdict(measure_device(own_memory_gb()))
    else:
        report = train(args)
    if dtransformer.is_chief():
        print(json.dumps({"worker": args.worker, **report}), flush=True)
    dtransformer.shutdown()


def train(args):
    import numpy as np

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.parallel.collectives.objects import all_gather_json

    dtransformer.init(make_config(args.worker))
    trainer = dtransformer.Trainer(make_network(args))
    trainer.compile("adam", CrossEntropyLoss())
    ids = np.random.default_rng(0).integers(4, args.vocab_size, (args.rows, args.length + 1))
    index, count = dtransformer.data_shard()
    local_ids = ids.astype("int32")[index::count]
    inputs = local_ids[:, :-1]
    if args.kind == "translation":
        inputs = {"source": inputs, "target": inputs}
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        trainer.train_on_batch(inputs, local_ids[:, 1:], shard=False)
        times.append(time.perf_counter() - start)
    config = make_config(args.worker)
    is_alone = config.model_parallel == config.pipeline_stage == 1
    rows = trainer.memory_report(inputs if is_alone else None).rows
    memory = {row.what: row.planned for row in rows}
    memory_by_rank = all_gather_json(memory, "benchmark/memory")
    return {
        "seconds": times[2:],
        "memory": max(memory_by_rank, key=lambda memory_bytes: sum(memory_bytes.values())),
    }


def predict_cost(args, name, device):
    """Return the planner's `Cost` for a layout on a measured device."""
    from dtransformer.planner import Cluster, Constants, Device, Job, Link, cost, from_network

    fields = {k: v for k, v in device.items() if k != "worker"}
    fields["constants"] = Constants(**fields["constants"])
    fields["links"] = {axis: Link(**link) for axis, link in fields["links"].items()}
    cluster = Cluster(Device(**fields), count_ranks(name), count_ranks(name))
    job = Job(args.rows, "float32", "adam")
    return cost(from_network(make_network(args)), cluster, job, make_config(name))


def select_best_device(devices):
    """Return the fastest of several measurements of a device. Related values stay together."""
    best = dict(max(devices, key=lambda device: device["tflops_32_bit"]))
    best["tflops_16_bit"] = max(device["tflops_16_bit"] for device in devices)

    def large_transfer_seconds(link):
        return 4e6 / (link["gb_per_second"] * 1e9) + 1e-6 * link["call_us"]

    best["links"] = {
        axis: min((device["links"][axis] for device in devices), key=large_transfer_seconds)
        for axis in best["links"]
    }
    return best


def compare_layout(name, cost, runs):
    memory = runs[0]["memory"]
    bytes_by_kind = cost.bytes_by_kind
    planned = sum(bytes_by_kind[kind] for kind in ("weights", "gradients", "states", "activations"))
    seconds = min(itertools.chain(*(run["seconds"] for run in runs)))
    return {
        "step_seconds": round(seconds, 4),
        "planned_seconds": round(cost.step_seconds, 4),
        "error": round(cost.step_seconds / seconds - 1, 3),
        "planned_by_kind": {k: round(v, 4) for k, v in cost.seconds_by_kind.items() if v},
        "memory_bytes": sum(memory.values()),
        "memory_error": round(planned / sum(memory.values()) - 1, 3),
    }


def ranking(layouts):
    pairs = list(itertools.combinations(layouts.values(), 2))
    distinct_pairs = [
        (a, b)
        for a, b in pairs
        if max(a["step_seconds"], b["step_seconds"])
        > 1.1 * min(a["step_seconds"], b["step_seconds"])
    ]
    is_ordered = [
        (a["step_seconds"] < b["step_seconds"]) == (a["planned_seconds"] < b["planned_seconds"])
        for a, b in distinct_pairs
    ]
    return sum(is_ordered) / len(is_ordered) if is_ordered else 1.0


def main():
    args = parse_arguments()
    if args.worker is not None:
        return work(args)
    names, arguments = args.layouts.split(","), [__file__, *sys.argv[1:], "--worker"]
    devices, runs = {}, {}
    for _ in range(args.rounds):
        for ranks in sorted({count_ranks(name) for name in names}):
            result = printed_json(MEASURE, ranks, [*arguments, MEASURE], '"worker"', 600)
            devices.setdefault(ranks, []).append(result)
        for name in names:
            result = printed_json(name, count_ranks(name), [*arguments, name], '"worker"', 600)
            runs.setdefault(name, []).append(result)
            print(name, result["seconds"][:3], file=sys.stderr)
    layouts = {}
    for name in names:
        device = select_best_device(devices[count_ranks(name)])
        layouts[name] = compare_layout(name, predict_cost(args, name, device), runs[name])
    report = {
        "options": {k: v for k, v in vars(args).items() if k != "worker"},
        "devices": {ranks: select_best_device(result) for ranks, result in devices.items()},
        "layouts": layouts,
        "ranking": ranking(layouts),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
