"""Fine-tune a language model of a folder with low-rank adapters, and save these apart.

    python examples/fine_tuning/train.py
    python examples/fine_tuning/train.py --model models/llama-3.2-1b --dtype bfloat16 --ids ids.npy
    horovodrun -np 2 python examples/fine_tuning/train.py --model-parallel 2

Without `--model` the script makes a small random Llama, in the folder runs/fine_tuning. It learns
the bytes of this file, where there is no file of ids: an int array of NumPy's, [rows, positions],
made with the model's own tokenizer.

On whatever number of ranks, it prints the same losses.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.models import CausalLM, add_lora, from_pretrained, save_lora, save_pretrained

RUNS = pathlib.Path("runs/fine_tuning")
LENGTH = 64


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


class PrintLosses(keras.callbacks.Callback):
    """Prints the mean loss of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if dtransformer.is_chief():
            print(f"epoch {epoch + 1}   loss {logs['loss']:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="folder, as transformers saves it")
    parser.add_argument("--ids", type=pathlib.Path, help="ids of texts, a .npy file")
    parser.add_argument("--out", type=pathlib.Path, default=RUNS / "adapters")
    parser.add_argument("--dtype", default="float32", help="bfloat16 stores the base in 16 bits")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--targets", default="*attention/(query|value)_kernel")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--model-parallel", type=int, default=1)
    arguments = parser.parse_args()

    config = dtransformer.TransformerOpParallelConfig(model_parallel=arguments.model_parallel)
    dtransformer.init(config)  # data parallel over the ranks that are left
    folder = arguments.model or RUNS / "small_llama"
    if arguments.model is None and not folder.exists():
        small_llama(folder)
    network = from_pretrained(folder, dtype=arguments.dtype)
    kernels = add_lora(network, arguments.rank, alpha=2 * arguments.rank, targets=arguments.targets)
    trainable = sum(np.prod(weight.shape) for weight in network.trainable_variables)

    ids = rows_of_bytes(pathlib.Path(__file__)) if arguments.ids is None else np.load(arguments.ids)
    data = tf.data.Dataset.from_tensor_slices((ids[:, :-1], ids[:, 1:]))
    data = data.shuffle(len(ids), seed=0).batch(arguments.batch_size, drop_remainder=True)
    trainer = dtransformer.Trainer(network)
    trainer.compile(keras.optimizers.AdamW(arguments.learning_rate, weight_decay=0.0))
    if dtransformer.is_chief():
        print(f"{len(kernels)} kernels have adapters: {trainable:,} numbers are trained")
    trainer.fit(data, epochs=arguments.epochs, callbacks=[PrintLosses()], verbose=0)
    save_lora(network, arguments.out, family="llama" if arguments.model is None else None)
    dtransformer.shutdown()


if __name__ == "__main__":
    main()
