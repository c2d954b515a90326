"""Compare the planner with this machine: steps and memory of small jobs, and ranking; print JSON.

    python benchmarks/planner.py
    python benchmarks/planner.py --layouts alone,dp2,mp2,pp2 --rounds 3

The machine is measured for each number of ranks, as `dtransformer plan --measure` does, by turns with
the layouts. `step_seconds` is the least of a layout's steps, of all rounds, as what else runs on a
machine only adds to it; so are the machine's figures. `memory_bytes` is the fullest rank's by
`memory_report()`. `ranking` is whether the planner puts pairs of layouts in the measured order, as a
share of the pairs whose steps differ by more than a tenth.
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
OF_FOUR = ("dp4", "dp2pp2", "dp2mp2")
MEASURE = "measure"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts", default=",".join(n for n in LAYOUTS if n not in OF_FOUR), help="with commas"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each round, the first two apart")
    parser.add_argument("--kind", default="causal", choices=("causal", "translation"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16, help="texts of a global batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(name):
    return TransformerOpParallelConfig(**{"data_parallel": 1, **LAYOUTS[name]})


def ranks_of(name):
    config = config_of(name)
    return config.data_parallel * config.model_parallel * config.pipeline_stage


def network(args):
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
    """Train with one layout on this rank, or measure the machine; rank 0 prints it."""
    import dtransformer

    if args.worker == MEASURE:
        from dtransformer.cli.measured_machine import measure_device, own_memory_gb

        found = dataclasses.asdict(measure_device("measured", own_memory_gb()))
    else:
        found = train(args)
    if dtransformer.is_chief():
        print(json.dumps({"worker": args.worker, **found}), flush=True)
    dtransformer.shutdown()


def train(args):
    import numpy as np

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.parallel.collectives.objects import all_gather_json

    dtransformer.init(config_of(args.worker))
    trainer = dtransformer.Trainer(network(args))
    trainer.compile("adam", CrossEntropyLoss())
    ids = np.random.default_rng(0).integers(4, args.vocab_size, (args.rows, args.length + 1))
    index, count = dtransformer.data_shard()
    own = ids.astype("int32")[index::count]
    inputs = own[:, :-1]
    if args.kind == "translation":
        inputs = {"source": inputs, "target": inputs}
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        trainer.train_on_batch(inputs, own[:, 1:], shard=False)
        times.append(time.perf_counter() - start)
    config = config_of(args.worker)
    is_alone = config.model_parallel == config.pipeline_stage == 1
    rows = trainer.memory_report(inputs if is_alone else None).rows
    memory = {row.what: row.planned for row in rows}
    everyone = all_gather_json(memory, "benchmark/memory")
    return {"seconds": times[2:], "memory": max(everyone, key=lambda one: sum(one.values()))}


def predicted(args, name, device):
    """Return the planner's `Cost` of a layout on a measured device."""
    from dtransformer.planner import Cluster, Constants, Device, Job, Link, cost, from_network

    fields = {k: v for k, v in device.items() if k != "worker"}
    fields["constants"] = Constants(**fields["constants"])
    fields["links"] = {axis: Link(**link) for axis, link in fields["links"].items()}
    cluster = Cluster(Device(**fields), ranks_of(name), ranks_of(name))
    job = Job(args.rows, "float32", "adam")
    return cost(from_network(network(args)), cluster, job, config_of(name))


def best_of(devices):
    """Return the best of devices that were measured by turns: figures that belong together, together."""
    found = dict(max(devices, key=lambda one: one["tflops_32_bit"]))
    found["tflops_16_bit"] = max(one["tflops_16_bit"] for one in devices)
    large = lambda link: 4e6 / (link["gb_per_second"] * 1e9) + 1e-6 * link["call_us"]
    found["links"] = {
        axis: min((one["links"][axis] for one in devices), key=large) for axis in found["links"]
    }
    return found


def compared(name, cost, runs):
    memory = runs[0]["memory"]
    own = cost.bytes_by_kind
    planned = sum(own[kind] for kind in ("weights", "gradients", "states", "activations"))
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
    apart = [
        (a, b)
        for a, b in pairs
        if max(a["step_seconds"], b["step_seconds"])
        > 1.1 * min(a["step_seconds"], b["step_seconds"])
    ]
    same = [
        (a["step_seconds"] < b["step_seconds"]) == (a["planned_seconds"] < b["planned_seconds"])
        for a, b in apart
    ]
    return sum(same) / len(same) if same else 1.0


def main():
    args = parse_arguments()
    if args.worker is not None:
        return work(args)
    names, arguments = args.layouts.split(","), [__file__, *sys.argv[1:], "--worker"]
    devices, runs = {}, {}
    for _ in range(args.rounds):
        for ranks in sorted({ranks_of(name) for name in names}):
            found = printed_json(MEASURE, ranks, [*arguments, MEASURE], '"worker"', 600)
            devices.setdefault(ranks, []).append(found)
        for name in names:
            found = printed_json(name, ranks_of(name), [*arguments, name], '"worker"', 600)
            runs.setdefault(name, []).append(found)
            print(name, found["seconds"][:3], file=sys.stderr)
    layouts = {}
    for name in names:
        device = best_of(devices[ranks_of(name)])
        layouts[name] = compared(name, predicted(args, name, device), runs[name])
    report = {
        "options": {k: v for k, v in vars(args).items() if k != "worker"},
        "devices": {ranks: best_of(found) for ranks, found in devices.items()},
        "layouts": layouts,
        "ranking": ranking(layouts),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
