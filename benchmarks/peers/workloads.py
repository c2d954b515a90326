"""The models that all contestants train, and one batch of full sentences for each.

Read by environments that have NumPy alone in common.
"""

import dataclasses
import json
import os
import sys
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A pre-norm Transformer with ReLU, learned positions and dropout 0.1, in float32.

    Trained with AdamW (learning rate 1e-4) on the mean cross entropy of all tokens.

    Args:
        encoder_layers: number of blocks of the encoder; 0 for a language model.
        decoder_layers: number of blocks that predict.
        hidden_size, ffn_hidden_size, num_heads, vocab_size: as the layers'.
        batch_size: number of sentences.
        length: number of tokens of a sentence, on each side.
    """

    encoder_layers: int = 4
    decoder_layers: int = 4
    hidden_size: int = 256
    ffn_hidden_size: int = 1024
    num_heads: int = 8
    vocab_size: int = 8000
    batch_size: int = 32
    length: int = 32

    @property
    def tokens(self):
        """Number of tokens of a step, of both sides."""
        return self.batch_size * self.length * (2 if self.encoder_layers else 1)

    @property
    def passes(self):
        """Number of products of a forward product's size: itself, and two gradients."""
        return 3

    def batch(self):
        """Return (source or None, target, labels), int arrays [batch_size, length]."""
        shape = (3, self.batch_size, self.length)
        source, target, labels = np.random.default_rng(0).integers(4, self.vocab_size, shape)
        return source if self.encoder_layers else None, target, labels

    def products(self):
        """Return the products of the forward pass: {(batch, rows, inner, columns): number}.

        One for the projections of each input, as wide as it can be: three of self attention
        are one, and so are keys and values of a memory.
        """
        h, f, head = self.hidden_size, self.ffn_hidden_size, self.hidden_size // self.num_heads
        rows, heads = self.batch_size * self.length, self.batch_size * self.num_heads
        blocks = self.encoder_layers + self.decoder_layers
        crosses = self.decoder_layers if self.encoder_layers else 0
        found = {
            (1, rows, h, 3 * h): blocks,
            (1, rows, h, 2 * h): crosses,
            (1, rows, h, h): blocks + 2 * crosses,
            (1, rows, h, f): blocks,
            (1, rows, f, h): blocks,
            (1, rows, h, self.vocab_size): 1,
            (heads, self.length, head, self.length): blocks + crosses,
            (heads, self.length, self.length, head): blocks + crosses,
        }
        return {shape: number for shape, number in found.items() if number}

    def flops(self):
        """Return the floating-point operations of a step's products, all passes included."""
        forward = sum(2.0 * np.prod(shape) * number for shape, number in self.products().items())
        return self.passes * forward


def clock():
    """Return seconds: of the clock, or of the processor where `DTRANSFORMER_PROCESSOR` is set."""
    is_processor = os.environ.get("DTRANSFORMER_PROCESSOR")
    return time.process_time() if is_processor else time.perf_counter()


WORKLOADS = {
    "translation": Workload(),
    "wide": Workload(6, 6, hidden_size=512, ffn_hidden_size=2048),
    "language_model": Workload(0, 12, batch_size=8, length=256),
}


def workload_of(name):
    """Return the workload of a name."""
    from generation import Generation
    from published import PUBLISHED
    from sentences import Sentences

    others = {"greedy": Generation(), "beam_search": Generation(num_beams=4), **PUBLISHED}
    return {**WORKLOADS, **others, "sentences": Sentences()}[name]


def serve(make_run, num_first=1):
    """Take turns: for each number n on standard input, run n steps and print their seconds.

    Args:
        make_run: a function of the `Workload` and the other arguments of the command line, which
            returns a function of n that trains n steps and returns a list of seconds of each.
        num_first: number of steps before the turns, one after the other; the function's `result` is
            printed after them.
    """
    workload, *options = sys.argv[1:]
    start = time.perf_counter()
    run = make_run(workload_of(workload), *options)
    first, *_ = [run(1)[0] for _ in range(num_first)]
    started = {"start_s": time.perf_counter() - start, "first_step_s": first}
    print(json.dumps({**started, "result": getattr(run, "result", None)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def one_by_one(step):
    """Return a function of n that runs n steps and returns the seconds of each.

    What the last step returned is the function's `result`.
    """

    def run(number):
        seconds = []
        for _ in range(number):
            start = clock()
            run.result = step()
            seconds.append(clock() - start)
        return seconds

    return run
