"""Measure the idle time and the memory of pipeline stages and print JSON.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --cases 1f1b:8,gpipe:8,interleaved:8 --rounds 5

A case is a schedule and a number of micro-batches of equal size. The stages of the language model are
nearly equal because its vocabulary is small.

- `bubble`: median of `trainer.timeline()` over the rounds
- `theory`: bubble of the schedule with equal stages, backward passes of twice the forward time, and
  instant sends
- `instant_sends`: bubble of the schedule with the measured durations and instant sends
- `live_bytes`: peak of TensorFlow's allocator in a step, above the memory before the step, on the
  first stage
"""

import argparse
import json
import statistics
import sys
import time

import paths  # noqa: F401

from dtransformer.parallel.schedules import schedules
from dtransformer.parallel.schedules.instruction import COMPUTATIONS
from dtransformer.parallel.schedules.simulator import ideal_timeline, simulate
from harness.measure import passing_bytes
from harness.printed import run_programs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = "1f1b:8,1f1b:16,gpipe:8,gpipe:16,interleaved:8,zb_h1:8,zb_v:8"
    parser.add_argument("--cases", default=cases, help="cases, separated by commas")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="number of measured steps")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="texts in a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens in a text")
    parser.add_argument("--save_timeline", help="path of a .json file for each case, with {case}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train with one schedule on this rank. Rank 0 prints the results."""
    import keras
    import numpy as np

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import CausalLM
    from dtransformer.trainers import Trainer

    schedule, micro_batches = args.worker.split(":")
    micro_batches, chunks = int(micro_batches), max(1, schedules.SCHEDULES[schedule].min_chunks)
    config = dtransformer.TransformerOpParallelConfig(
        pipeline_stage=args.stages,
        micro_batch_num=micro_batches,
        pipeline_schedule=schedule,
        pipeline_chunks=chunks,
    )
    dtransformer.init(config)
    model = CausalLM(
        64, hidden_size=args.hidden_size, num_layers=args.layers, max_length=args.length
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(1e-3), CrossEntropyLoss())
    shape = args.rows * micro_batches, args.length + 1
    ids = np.random.default_rng(0).integers(4, 64, shape).astype("int32")

    def step():
        return trainer.train_on_batch(ids[:, :-1], ids[:, 1:])

    for _ in range(3):
        step()
    live_bytes = passing_bytes(step)
    all_instructions = schedules.instructions(schedule, config.placement, micro_batches)
    bubbles, ideals, seconds = [], [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        timeline = trainer.timeline()
        bubbles.append(timeline.bubble)
        ideals.append(ideal_timeline(timeline, all_instructions).bubble)
    if args.save_timeline:
        trainer.timeline(args.save_timeline.format(case=args.worker.replace(":", "-")))

    def median_ms(stage, kind):
        events = [e for e in timeline.get_stage_events(stage) if e.instruction.kind == kind]
        return 1e3 * statistics.median([e.end - e.start for e in events] or [0.0])

    result = {
        "bubble": statistics.median(bubbles),
        "theory": simulate(all_instructions, config.placement).bubble,
        "instant_sends": statistics.median(ideals),
        "bubbles": bubbles,
        **{
            f"{kind}_ms": [median_ms(stage, kind) for stage in range(args.stages)]
            for kind in COMPUTATIONS
        },
        "live_bytes": live_bytes,
        "tokens_per_second": ids[:, 1:].size / statistics.median(seconds),
    }
    if dtransformer.is_chief():
        print(json.dumps(result), flush=True)
    dtransformer.shutdown()


def main():
    args = parse_arguments()
    if args.worker is not None:
        return work(args)
    options = {k: v for k, v in vars(args).items() if k not in ("worker", "cases", "save_timeline")}
    programs = {
        case: (args.stages, [__file__, *sys.argv[1:], "--worker", case])
        for case in args.cases.split(",")
    }
    report = run_programs(options, "cases", programs, "instant_sends", timeout=900)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
