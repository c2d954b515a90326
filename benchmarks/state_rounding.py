"""Compare steps with bfloat16 and with float32 optimizer states, and print JSON.

    python benchmarks/state_rounding.py [--rounds 15] [--hidden 256] [--layers 4]

Two trainers start from equal weights in one process and take turns. `seconds` are the medians of a
step. `ratios` are the speeds with bfloat16 states, whose updates are rounded stochastically, relative to
float32 states. `cpu_seconds` and `cpu_ratio` are medians of processor time, which depends less on other
programs. `state_bytes` are the bytes of the optimizer's states.
"""

import argparse
import json
import statistics
import time

import keras
import paths  # noqa: F401

from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer
from harness.paired_steps import (
    TimedTrainer,
    add_sizes,
    compare_steps,
    language_model,
    median_seconds,
    random_batch,
    take_turns,
)

DTYPES = "float32", "bfloat16"


class Contestant(TimedTrainer):
    """`TimedTrainer` with a type of optimizer states.

    Args:
        dtype: `"float32"` or `"bfloat16"`.
        arguments: Arguments of the command.
    """

    def __init__(self, dtype, arguments):
        self.config = {"optimizer_state_dtype": dtype}
        self.cpu_seconds = []
        network = language_model(arguments)
        with parallel_config(**self.config):
            trainer = Trainer(network)
            trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss())
        super().__init__(trainer, random_batch(arguments))

    def step(self):
        """Train on the batch with the config."""
        start = time.process_time()
        with parallel_config(**self.config):
            super().step()
        self.cpu_seconds.append(time.process_time() - start)


def main():
    """Print the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser, rounds=15, rows=8, length=128, layers=4, hidden=256, vocab_size=8000)
    arguments = parser.parse_args()
    contestants = {dtype: Contestant(dtype, arguments) for dtype in DTYPES}
    for contestant in contestants.values():
        contestant.warm_up()
        contestant.cpu_seconds.clear()
    take_turns(list(contestants.values()), arguments.rounds)
    states = {
        dtype: sum(x.numpy().nbytes for x in contestant.trainer.optimizer.variables)
        for dtype, contestant in contestants.items()
    }
    cpu_seconds = {
        dtype: round(statistics.median(contestant.cpu_seconds), 3)
        for dtype, contestant in contestants.items()
    }
    report = {
        "arguments": vars(arguments),
        "parameters": contestants["float32"].trainer.network.count_params(),
        "state_bytes": states,
        "seconds": {dtype: round(x, 3) for dtype, x in median_seconds(contestants).items()},
        "cpu_seconds": cpu_seconds,
        "cpu_ratio": round(cpu_seconds["float32"] / cpu_seconds["bfloat16"], 3),
        **compare_steps(*contestants.values()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
