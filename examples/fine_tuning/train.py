"""Fine-tune a language model of a folder with low-rank adapters, and save these apart.

    python examples/fine_tuning/train.py
    python examples/fine_tuning/train.py --config mine.yaml --run runs/mine
    horovodrun -np 2 python examples/fine_tuning/train.py --model_parallel 2

The config names a folder and a file of ids: an int array of NumPy's, made with the model's own
tokenizer. As it stands, the script makes a small random Llama, which learns the bytes of this file.
Every eighth row is held out. The run's folder gets metrics.jsonl, a picture of the losses where
matplotlib is there, and the adapters.

On whatever number of ranks, it prints the same losses.
"""

import argparse
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
import yaml

import dtransformer
from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    add_lora,
    check_target,
    from_pretrained,
    save_lora,
    save_pretrained,
)
from dtransformer.reports import draw_losses
from dtransformer.trainers import Trainer
from dtransformer.trainers.callbacks import MetricsFile, StepTimer

HERE = pathlib.Path(__file__).parent
LENGTH = 64


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=HERE / "lora.yaml", type=pathlib.Path)
    parser.add_argument("--run", default="runs/fine_tuning", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    parser.add_argument("--model_parallel", type=int, default=1, help="shards of each operation")
    parser.add_argument("--overwrite", action="store_true", help="replace the run's adapters")
    return parser.parse_args()


def small_llama(folder):
    """Write a random Llama of bytes into a folder, if it is not there."""
    network = CausalLM(
        256,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=256,
        num_layers=2,
        dropout_rate=0.0,
        hidden_act="silu",
        positions="rotary",
        tied_head=False,
        embedding_scale=1.0,
        norm="rms_norm",
        gated=True,
        use_bias=False,
        pad_id=None,
        start_id=None,
        end_id=0,
    )
    network.build()
    save_pretrained(network, folder, family="llama")


def rows_of_bytes(path):
    """Return the bytes of a file as rows [rows, LENGTH + 1]."""
    data = np.frombuffer(path.read_bytes(), "uint8").astype("int32")
    number = len(data) // (LENGTH + 1)
    return data[: number * (LENGTH + 1)].reshape(number, LENGTH + 1)


def datasets_of(ids, batch_size):
    """Return the batches to train with, and those of every eighth row, which are held out."""
    is_held_out = np.arange(len(ids)) % 8 == 7
    train, dev = (
        tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))
        for rows in (ids[~is_held_out], ids[is_held_out])
    )
    train = train.shuffle(len(ids), seed=0).batch(batch_size, drop_remainder=True)
    return train, dev.batch(batch_size)


def main():
    args = parse_arguments()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    data, adapters, training = config["data"], config["adapters"], config["training"]
    # Data parallel over the ranks that are left.
    parallel = dtransformer.TransformerOpParallelConfig(model_parallel=args.model_parallel)
    dtransformer.init(parallel, seed=training["seed"])
    check_target(args.run / "adapters", args.overwrite)  # before anything is trained
    folder = config["model"] or args.run / "small_llama"
    if config["model"] is None and not folder.exists():
        small_llama(folder)
    network = from_pretrained(folder, dtype=config["dtype"])
    kernels = add_lora(network, **adapters)
    trainable = sum(np.prod(weight.shape) for weight in network.trainable_variables)
    if dtransformer.is_chief():
        print(f"{len(kernels)} kernels have adapters: {trainable:,} numbers are trained")

    ids = rows_of_bytes(pathlib.Path(__file__)) if data["ids"] is None else np.load(data["ids"])
    batches, dev_batches = datasets_of(ids, data["batch_size"])
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.AdamW(training["learning_rate"], weight_decay=0.0))
    callbacks = [StepTimer()]
    if dtransformer.is_chief():
        callbacks.append(MetricsFile(args.run / "metrics.jsonl"))
    trainer.fit(
        batches,
        epochs=args.epochs or training["epochs"],
        validation_data=dev_batches,
        callbacks=callbacks,
        verbose=2,
    )
    save_lora(network, args.run / "adapters", overwrite=args.overwrite)  # by its folder's family
    if dtransformer.is_chief():
        try:
            draw_losses(args.run / "metrics.jsonl", args.run / "losses.png")
        except ImportError as error:
            print(error)
    dtransformer.shutdown()


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"train.py: {error}")
