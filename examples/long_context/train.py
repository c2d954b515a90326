"""Train a language model on sequences that are sharded over ranks.

    python examples/long_context/train.py --length 1024
    dtransformer launch -np 2 -- python examples/long_context/train.py --context_parallel 2
    dtransformer launch -np 4 -- python examples/long_context/train.py --context_parallel 4 --mode ring

Each row contains a random text twice. To predict the second half, the model must attend to the first
half, which is on another rank. Only the second half counts in the loss. The losses are the same for
every number of ranks.

The script prints the memory and the communication of rank 0. It writes metrics.jsonl and, if matplotlib
is installed, a plot of the losses to the run folder.
"""

import argparse
import importlib.util
import json
import pathlib
import sys

import dtransformer  # isort: skip  (before TensorFlow, to enable oneDNN)

import keras
import numpy as np
import yaml

from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from dtransformer.trainers.callbacks import MetricsFile

HERE = pathlib.Path(__file__).parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=HERE / "copies.yaml", type=pathlib.Path)
    parser.add_argument("--run", default="runs/long_context", type=pathlib.Path)
    parser.add_argument("--length", type=int, help="tokens per row (default: from the config)")
    parser.add_argument("--steps", type=int, help="training steps (default: from the config)")
    parser.add_argument(
        "--context_parallel", type=int, default=1, help="number of shards of each sequence"
    )
    parser.add_argument(
        "--mode", default="auto", help="ulysses, all_gather, ring, ulysses_ring or auto"
    )
    return parser.parse_args()


def batches(steps, rows, length, vocab_size):
    """Yield tokens, labels and sample weights, each [rows, length]."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        text = rng.integers(1, vocab_size, (rows, length // 2), "int32")
        tokens = np.concatenate([text, text], axis=1)
        labels = np.roll(tokens, -1, axis=1)
        is_counted = np.arange(length) >= length // 2
        is_counted[-1] = False
        yield tokens, labels, np.broadcast_to(is_counted, labels.shape).astype("float32")


def draw_losses(run):
    """Plot the loss of each step as losses.png in the run folder."""
    from matplotlib.figure import Figure

    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    # `loss` is the mean since the start of the epoch, for logs without `step_loss`.
    losses = [step.get("step_loss", step["loss"]) for step in steps]
    axes.plot([step["step"] for step in steps], losses, lw=0.8)
    axes.set(xlabel="step", ylabel="loss")
    figure.savefig(run / "losses.png", dpi=120)


def main():
    args = parse_arguments()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    training = config["training"]
    data = {**config["data"], "length": args.length or config["data"]["length"]}
    parallel = dtransformer.TransformerOpParallelConfig(
        context_parallel=args.context_parallel, context_parallel_mode=args.mode
    )
    dtransformer.init(parallel, seed=training["seed"])
    trainer = Trainer(CausalLM(data["vocab_size"], **config["model"]))
    trainer.compile(keras.optimizers.AdamW(training["learning_rate"]), CrossEntropyLoss())
    callbacks = []
    if dtransformer.is_chief():
        callbacks.append(MetricsFile(args.run / "metrics.jsonl"))
    steps = args.steps or training["steps"]
    trainer.fit(batches(steps, **data), steps_per_epoch=steps, callbacks=callbacks, verbose=2)
    tokens, *_ = next(batches(1, **data))
    if dtransformer.is_chief():
        print(trainer.memory_report(tokens))
        if args.context_parallel > 1:
            print(trainer.communication_report())
        if importlib.util.find_spec("matplotlib"):
            draw_losses(args.run)
    dtransformer.shutdown()


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"train.py: {error}")
