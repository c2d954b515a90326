"""Compare logits at masked positions with logits at all positions of BERT-base, and print JSON.

    python benchmarks/masked_positions.py [--rounds 5] [--rows 1] [--layers 12]

Both trainers start from equal weights and get the same masks. They take turns in each round. `ratios`
are the speeds at masked positions, relative to all positions. `flops` and `tokens_per_second` use the
same counts as the training logs. `loss_difference` is the maximum relative difference of a loss.
"""

import argparse
import json
import math
import statistics

import paths  # noqa: F401

KINDS = "all", "masked"
MASK_ID = 103


def make_batch(rows, length, rate, vocab_size, all_positions):
    """Return the inputs and labels of a batch of random tokens."""
    import numpy as np

    from dtransformer.datasets.masked_language_model import Masking, num_positions, select_masked

    masking = Masking(rate, MASK_ID, np.array([MASK_ID]), np.arange(1000, vocab_size))
    count = None if all_positions else num_positions(length, rate)
    examples = []
    for row in range(rows):
        rng = np.random.default_rng(row)
        ids, labels = masking(rng.integers(1000, vocab_size, length).astype(np.int32), rng)
        examples.append(select_masked({"tokens": ids}, labels, count))
    inputs = {name: np.stack([x[name] for x, _ in examples]) for name in examples[0][0]}
    return inputs, np.stack([labels for _, labels in examples])


def make_contestant(arguments, all_positions):
    """Return the `TimedTrainer` of a BERT.

    Args:
        arguments: Arguments of the command.
        all_positions: Boolean, whether to compute logits at all positions.
    """
    import keras

    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import MaskedLM
    from dtransformer.trainers import Trainer
    from harness.paired_steps import TimedTrainer

    keras.utils.set_random_seed(0)
    vocab_size = arguments.vocab_size
    network = MaskedLM(
        vocab_size,
        hidden_size=arguments.hidden,
        num_heads=arguments.hidden // 64,
        num_layers=arguments.layers,
        dropout_rate=0.0,
    )
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(1e-3), CrossEntropyLoss(ignore_id=-100))
    options = arguments.rows, arguments.length, arguments.rate, vocab_size
    return TimedTrainer(trainer, make_batch(*options, all_positions))


def describe(contestant):
    """Return a dict of the measured values of a contestant."""
    from dtransformer.reports.throughput import tokens_and_flops

    network = contestant.trainer.network
    logits = network(contestant.batch[0])
    tokens, flops = tokens_and_flops(network, *contestant.batch)
    return {
        "logits_bytes": math.prod(logits.shape) * logits.dtype.size,
        "flops": flops,
        "seconds": [round(x, 3) for x in contestant.seconds],
        "tokens_per_second": round(tokens / statistics.median(contestant.seconds), 1),
    }


def main():
    from harness.paired_steps import compare_steps, take_turns

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=30522)
    arguments = parser.parse_args()
    contestants = [make_contestant(arguments, kind == "all") for kind in KINDS]
    for contestant in contestants:
        contestant.warm_up()
    take_turns(contestants, arguments.rounds)
    descriptions = dict(zip(KINDS, map(describe, contestants)))
    report = {
        "arguments": vars(arguments),
        "positions": contestants[1].batch[1].shape[1],
        **descriptions,
        **compare_steps(*contestants),
        "flops_ratio": round(descriptions["all"]["flops"] / descriptions["masked"]["flops"], 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
