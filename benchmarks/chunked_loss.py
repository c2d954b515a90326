"""Compare a loss in chunks with a loss from all logits of a large vocabulary, and print JSON.

    python benchmarks/chunked_loss.py [--rounds 5] [--length 2048] [--vocab-size 128256]

For each kind, a fresh process measures the increase of its peak resident memory since before the
first training step. Then both trainers start from equal weights in one process and take turns.
`ratios` are the speeds with chunks, relative to all logits. `loss_difference` is the maximum relative
difference of a loss.
"""

import argparse
import json
import math
import subprocess
import sys

import paths  # noqa: F401

KINDS = {"full": None, "chunked": "auto"}


def make_contestant(arguments, kind):
    """Return the `TimedTrainer` of a causal language model, with a batch of random tokens.

    Args:
        arguments: Arguments of the command.
        kind: Key of `KINDS`.
    """
    import keras

    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.trainers import Trainer
    from harness.paired_steps import TimedTrainer, language_model, random_batch

    network = language_model(arguments, max_length=arguments.length)
    network.build()
    trainer = Trainer(network)
    loss = CrossEntropyLoss(chunk_tokens=KINDS[kind])
    trainer.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=arguments.jit_compile or "auto")
    return TimedTrainer(trainer, random_batch(arguments))


def measure_memory(arguments, kind):
    """Return the increase of this process' peak resident memory over two steps, in bytes."""
    from harness.measure import peak_bytes

    contestant = make_contestant(arguments, kind)
    before = peak_bytes()
    contestant.step()
    contestant.step()
    return peak_bytes() - before


def measure_in_process(kind):
    """Return the result of `measure_memory` in a fresh process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", kind]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    from harness.paired_steps import add_sizes, compare_steps, median_seconds, take_turns

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser, rounds=5, rows=1, length=2048, layers=1, hidden=256, vocab_size=128256)
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--memory-of", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments, arguments.memory_of)))
        return
    peaks = {kind: measure_in_process(kind) for kind in KINDS}
    contestants = {kind: make_contestant(arguments, kind) for kind in KINDS}
    for contestant in contestants.values():
        contestant.warm_up()
    full, chunked = contestants.values()
    take_turns([full, chunked], arguments.rounds)
    num_tokens = math.prod(full.batch[0].shape)
    arguments = {name: x for name, x in vars(arguments).items() if name != "memory_of"}
    report = {
        "arguments": arguments,
        "logits_bytes": 4 * num_tokens * arguments["vocab_size"],
        "peak_increase": peaks,
        "tokens_per_second": {
            kind: round(num_tokens / seconds, 1)
            for kind, seconds in median_seconds(contestants).items()
        },
        **compare_steps(full, chunked),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
