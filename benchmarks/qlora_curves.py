"""Train adapters on frozen kernels in float32, NF4 and int8 on the same batches, and print JSON.

    python benchmarks/qlora_curves.py [--steps 20] [--base-steps 150] > docs/pictures/results/qlora.json

A small Llama first learns packed English text of the embedded corpus. Each case loads it, quantizes
its kernels while they are loaded, and trains equal adapters on French text. The JSON contains the
loss of every step and the bytes of the frozen kernels. `python docs/pictures` draws it.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import tempfile

import keras
import numpy as np
import paths  # noqa: F401

import dtransformer
from dtransformer import Trainer
from dtransformer.datasets import SubwordTokenizer
from dtransformer.datasets.embedded import sentence_pairs
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, add_lora, from_pretrained, quantize, save_pretrained
from dtransformer.parallel.tensor_parallel.quantized_kernel import get_quantized_kernels

CASES = {"LoRA": None, "QLoRA, NF4": "nf4", "QLoRA, int8": "int8"}
ROWS, LENGTH = 8, 64
LLAMA = {
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 256,
    "dropout_rate": 0.0,
    "positions": "rotary",
    "norm": "rms_norm",
    "gated": True,
    "hidden_act": "silu",
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
}


def make_batches(num_pairs=4000):
    """Return the vocabulary size and the packed English and French batches, `[n, rows, length]`."""
    pairs = sentence_pairs(num_pairs)
    tokenizer = SubwordTokenizer.train([text for pair in pairs for text in pair], vocab_size=1000)
    batches = []
    for side in (0, 1):
        texts = tokenizer.encode([pair[side] for pair in pairs]).to_list()
        stream = np.concatenate([[*ids, tokenizer.end_id] for ids in texts]).astype("int32")
        num_batches = len(stream) // (ROWS * (LENGTH + 1))
        stream = stream[: num_batches * ROWS * (LENGTH + 1)]
        batches.append(stream.reshape(num_batches, ROWS, LENGTH + 1))
    return tokenizer.vocab_size, *batches


def train(network, batches, steps, learning_rate):
    """Train a network and return the loss of each step."""
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.AdamW(learning_rate), CrossEntropyLoss())
    losses = []
    for step in range(steps):
        rows = batches[step % len(batches)]
        logs = trainer.train_on_batch(rows[:, :-1], rows[:, 1:], return_dict=True)
        losses.append(float(logs["step_loss"]))
    return losses


def kernel_bytes(network):
    """Return the stored bytes of the block kernels."""
    quantized = get_quantized_kernels(network)
    parts = [part for kernel in quantized for part in kernel.parts.values()]
    kernels = [w for w in network.blocks.weights if w.path.endswith("_kernel")]
    return sum(weight.numpy().nbytes for weight in kernels + parts)


def main():
    """Print the losses of all cases as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--base-steps", type=int, default=150)
    arguments = parser.parse_args()
    keras.utils.set_random_seed(0)
    vocab_size, english, french = make_batches()
    report = {
        "machine": f"{os.cpu_count()} CPU cores",
        "date": str(datetime.date.today()),
        "arguments": vars(arguments),
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder) / "base"
        network = CausalLM(vocab_size, **LLAMA)
        report["base_losses"] = train(network, english, arguments.base_steps, 3e-3)
        save_pretrained(network, folder, "llama")
        for name, kind in CASES.items():
            dtransformer.set_seed(1)
            with quantize(kind) if kind else contextlib.nullcontext():
                network = from_pretrained(folder)
            num_bytes = kernel_bytes(network)
            add_lora(network, rank=8, targets="*_kernel")
            losses = train(network, french, arguments.steps, 1e-2)
            report["cases"][name] = {"losses": losses, "kernel_bytes": num_bytes}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
