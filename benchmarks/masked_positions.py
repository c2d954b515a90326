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
import time

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


class Contestant:
    """Trainer of a BERT and its batch.

    Args:
        arguments: Arguments of the command.
        all_positions: Boolean, whether to compute logits at all positions.
    """

    def __init__(self, arguments, all_positions):
        import keras

        from dtransformer.layers import CrossEntropyLoss
        from dtransformer.models import MaskedLM
        from dtransformer.reports.throughput import tokens_and_flops
        from dtransformer.trainers import Trainer

        keras.utils.set_random_seed(0)
        vocab_size = arguments.vocab_size
        network = MaskedLM(
            vocab_size,
            hidden_size=arguments.hidden,
            num_heads=arguments.hidden // 64,
            num_layers=arguments.layers,
            dropout_rate=0.0,
        )
        self.trainer = Trainer(network)
        self.trainer.compile(keras.optimizers.SGD(1e-3), CrossEntropyLoss(ignore_id=-100))
        options = arguments.rows, arguments.length, arguments.rate, vocab_size
        self.batch = make_batch(*options, all_positions)
        logits = network(self.batch[0])
        self.logits_bytes = math.prod(logits.shape) * logits.dtype.size
        self.losses = []
        self.seconds = []
        self.step()
        self.step()  # The first two steps compile.
        self.seconds.clear()
        self.tokens, self.flops = tokens_and_flops(network, *self.batch)

    def step(self):
        """Train on the batch and keep the loss and the seconds."""
        start = time.perf_counter()
        logs = self.trainer.train_on_batch(*self.batch, return_dict=True)
        self.losses.append(float(logs["step_loss"]))
        self.seconds.append(time.perf_counter() - start)

    def report(self):
        """Return a dict of the measured values."""
        return {
            "logits_bytes": self.logits_bytes,
            "flops": self.flops,
            "seconds": [round(x, 3) for x in self.seconds],
            "tokens_per_second": round(self.tokens / statistics.median(self.seconds), 1),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=30522)
    arguments = parser.parse_args()
    contestants = {kind: Contestant(arguments, kind == "all") for kind in KINDS}
    for index in range(arguments.rounds):
        for kind in KINDS[:: (-1) ** index]:
            contestants[kind].step()
    of_all, masked = (contestants[kind] for kind in KINDS)
    ratios = [x / y for x, y in zip(of_all.seconds, masked.seconds)]
    differences = [abs(x / y - 1) for x, y in zip(masked.losses, of_all.losses)]
    report = {
        "arguments": vars(arguments),
        "positions": masked.batch[1].shape[1],
        **{kind: contestants[kind].report() for kind in KINDS},
        "ratios": [round(x, 2) for x in ratios],
        "median_ratio": round(statistics.median(ratios), 2),
        "flops_ratio": round(of_all.flops / masked.flops, 3),
        "loss_difference": max(differences),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
