"""Train a language model on sequences that are sharded over ranks.

    python examples/long_context/train.py --length 1024
    horovodrun -np 2 python examples/long_context/train.py --context_parallel 2
    horovodrun -np 4 python examples/long_context/train.py --context_parallel 4 --mode ring

Each row is a text of random words, and the same text once more: what comes next in the second half can
only be told by looking half of the sequence back, which is on another rank. Prints losses, of the
second half alone; how long a step took; and what the ranks' memory and communication are for. On
whatever number of ranks the losses are the same.
"""

import argparse
import time

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="of a batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context_parallel", type=int, default=1, help="shards of the sequence")
    parser.add_argument("--mode", default="auto", help="ulysses, all_gather, ring or auto")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=64)
    return parser.parse_args()


def batches(args):
    """Yield tokens, labels and the weights of labels, each [rows, length]."""
    rng = np.random.default_rng(0)
    for _ in range(args.steps):
        text = rng.integers(1, args.vocab_size, (args.rows, args.length // 2), "int32")
        tokens = np.concatenate([text, text], axis=1)
        labels = np.roll(tokens, -1, axis=1)
        counts = np.arange(args.length) >= args.length // 2
        counts[-1] = False
        yield tokens, labels, np.broadcast_to(counts, labels.shape).astype("float32")


def main():
    args = parse_arguments()
    config = dtransformer.TransformerOpParallelConfig(
        context_parallel=args.context_parallel, context_parallel_mode=args.mode
    )
    dtransformer.init(config)
    model = CausalLM(
        args.vocab_size,
        hidden_size=args.hidden_size,
        num_heads=8,
        num_layers=args.layers,
        dropout_rate=0.0,
        positions="rotary",
    )
    trainer = dtransformer.Trainer(model)
    trainer.compile(keras.optimizers.AdamW(3e-3), CrossEntropyLoss())
    for number, (tokens, labels, weights) in enumerate(batches(args)):
        start = time.perf_counter()
        logs = trainer.train_on_batch(tokens, labels, weights, return_dict=True)
        seconds = time.perf_counter() - start
        if dtransformer.is_chief():
            print(
                f"step {number}: loss {float(logs['step_loss']):.6f}, {seconds:.1f} s", flush=True
            )
    if dtransformer.is_chief():
        print(trainer.memory_report(tokens))
        if args.context_parallel > 1:
            print(trainer.communication_report())
    dtransformer.shutdown()


if __name__ == "__main__":
    main()
