"""Count the elements that a rank sends in a step at each level of optimizer sharding; print JSON.

    python benchmarks/communication.py
    python benchmarks/communication.py --ranks 4 --hidden_size 512

The counts come from the collectives of the compiled step. `parameters_sent` is the number of
elements sent by a ring algorithm, divided by the number of parameters and without the factor
(d - 1) / d of d ranks. The theory gives 2, 2, 2 and 3. Level 3 sends embedding tables only
twice, because lookups need no second all-gather.
"""

import argparse
import json
import sys

import paths  # noqa: F401

from harness.measure import translation_trainer
from harness.printed import run_programs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default="0,1,2,3", help="levels, separated by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--layers", type=int, default=2, help="layers of the encoder and of the decoder"
    )
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=1000)
    parser.add_argument("--gradient_dtype", default="float32")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train a step at one level on this rank. Rank 0 prints its communication."""
    import math

    import numpy as np

    import dtransformer

    config = dtransformer.TransformerOpParallelConfig(
        optimizer_shard=args.worker, gradient_dtype=args.gradient_dtype
    )
    dtransformer.init(config)
    trainer = translation_trainer(args.vocab_size, args.hidden_size, args.layers)
    # With one token per vocabulary entry, ranks send the full gradient of a table.
    ids = np.tile(np.arange(args.vocab_size, dtype="int32") % 60 + 4, 2).reshape(-1, 40)
    trainer.train_on_batch({"source": ids, "target": ids}, ids, shard=False)
    sent = [c for c in trainer.communication_report().collectives if c.over == "ranks"]
    # Ignore the branch that sends only a few rows of a table's gradient, as it does not run.
    sent = [c for c in sent if None not in c.shape]
    weights = trainer.network.trainable_variables
    parameters = sum(math.prod(w.shape) for w in weights)
    tables = sum(math.prod(w.shape) for w in weights if w.path.endswith("_embedding/table"))
    entries = sum(c.elements_sent for c in sent)
    theory = 3 - tables / parameters if args.worker == 3 else 2
    result = {
        "parameters": parameters,
        "elements_sent": round(entries),
        "bytes_sent": sum(c.bytes_sent for c in sent),
        "collectives": len(sent),
        "parameters_sent": entries / parameters / (1 - 1 / args.ranks),
        "theory": theory,
    }
    if dtransformer.is_chief():
        print(json.dumps(result), flush=True)
    dtransformer.shutdown()


def main():
    args = parse_arguments()
    if args.worker is not None:
        return work(args)
    options = {k: v for k, v in vars(args).items() if k not in ("worker", "levels")}
    programs = {
        level: (args.ranks, [__file__, *sys.argv[1:], "--worker", level])
        for level in args.levels.split(",")
    }
    report = run_programs(options, "levels", programs, "elements_sent", timeout=600)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
