"""Trainers that take turns with single steps, so that a busy machine slows all of them down."""

import argparse
import statistics
import time

import keras
import numpy as np


class TimedTrainer:
    """Trainer with a batch, whose steps are timed.

    Args:
        trainer: Compiled `Trainer`.
        batch: Arguments of `train_on_batch`: inputs and labels.

    Attributes:
        losses: List of the losses of all steps.
        seconds: List of the durations of the steps after `warm_up`.
    """

    def __init__(self, trainer, batch):
        self.trainer = trainer
        self.batch = batch
        self.losses = []
        self.seconds = []

    def step(self):
        """Train on the batch and keep the loss and the seconds."""
        start = time.perf_counter()
        logs = self.trainer.train_on_batch(*self.batch, return_dict=True)
        self.losses.append(float(logs["step_loss"]))
        self.seconds.append(time.perf_counter() - start)

    def warm_up(self):
        """Run two steps, which compile, and discard their durations."""
        self.step()
        self.step()
        self.seconds.clear()


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add integer options, such as `--vocab-size` for `vocab_size=8000`, with these defaults."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def language_model(arguments: argparse.Namespace, **options):
    """Return a new `CausalLM` with the sizes of the arguments, always with the same weights.

    Args:
        arguments: Has `vocab_size`, `hidden` and `layers`.
        **options: Other arguments of `CausalLM`.
    """
    from dtransformer.models import CausalLM

    keras.utils.set_random_seed(0)
    sizes = {"hidden_size": arguments.hidden, "num_heads": 4, "num_layers": arguments.layers}
    return CausalLM(arguments.vocab_size, **sizes, dropout_rate=0.0, pad_id=None, **options)


def random_batch(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels `[rows, length]` of a language model."""
    shape = arguments.rows, arguments.length
    ids = np.random.default_rng(0).integers(0, arguments.vocab_size, shape, "int32")
    return ids, np.roll(ids, -1, axis=1)


def median_seconds(contestants: dict[str, TimedTrainer]) -> dict[str, float]:
    """Return the median duration of a step of each contestant."""
    return {name: statistics.median(x.seconds) for name, x in contestants.items()}


def take_turns(contestants: list[TimedTrainer], num_rounds: int) -> None:
    """Let every contestant run one step per round, in an order that alternates."""
    for index in range(num_rounds):
        for contestant in contestants[:: (-1) ** index]:
            contestant.step()


def compare_steps(baseline: TimedTrainer, contestant: TimedTrainer) -> dict:
    """Return the speeds of a contestant relative to a baseline.

    Returns:
        A dict with `ratios`, one per round, `median_ratio`, and `loss_difference`, the maximum
        relative difference of a loss.
    """
    ratios = [x / y for x, y in zip(baseline.seconds, contestant.seconds)]
    differences = [abs(x / y - 1) for x, y in zip(contestant.losses, baseline.losses)]
    return {
        "ratios": [round(x, 2) for x in ratios],
        "median_ratio": round(statistics.median(ratios), 2),
        "loss_difference": max(differences),
    }
