"""Models that all contestants train, and one batch of full sentences for each.

All environments import this file, so it needs only NumPy.
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

    Contestants use AdamW (learning rate 1e-4) and the mean cross entropy of all tokens.

    Args:
        encoder_layers: Number of encoder blocks. `0` for a language model.
        decoder_layers: Number of decoder blocks.
        hidden_size: Number of features.
        ffn_hidden_size: Number of features inside the feed-forward layer.
        num_heads: Number of attention heads.
        vocab_size: Number of tokens in the vocabulary.
        batch_size: Number of sentences.
        length: Number of tokens of a sentence, on each side.
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
        """Number of tokens in a step, on both sides."""
        return self.batch_size * self.length * (2 if self.encoder_layers else 1)

    @property
    def passes(self):
        """Number of products for each forward product: itself and two gradients."""
        return 3

    def batch(self):
        """Return (source, target, labels): int arrays [batch_size, length]. `source` may be `None`."""
        shape = (3, self.batch_size, self.length)
        source, target, labels = np.random.default_rng(0).integers(4, self.vocab_size, shape)
        return source if self.encoder_layers else None, target, labels

    def products(self):
        """Return the products of the forward pass as a dict {(batch, rows, inner, columns): count}.

        Projections of the same input count as one wide product, as for queries, keys and values.
        """
        h, f, head = self.hidden_size, self.ffn_hidden_size, self.hidden_size // self.num_heads
        rows, heads = self.batch_size * self.length, self.batch_size * self.num_heads
        blocks = self.encoder_layers + self.decoder_layers
        crosses = self.decoder_layers if self.encoder_layers else 0
        counts = {
            (1, rows, h, 3 * h): blocks,
            (1, rows, h, 2 * h): crosses,
            (1, rows, h, h): blocks + 2 * crosses,
            (1, rows, h, f): blocks,
            (1, rows, f, h): blocks,
            (1, rows, h, self.vocab_size): 1,
            (heads, self.length, head, self.length): blocks + crosses,
            (heads, self.length, self.length, head): blocks + crosses,
        }
        return {shape: count for shape, count in counts.items() if count}

    def flops(self):
        """Return the floating-point operations of all products in a step."""
        forward = sum(2.0 * np.prod(shape) * count for shape, count in self.products().items())
        return self.passes * forward


def clock():
    """Return wall time in seconds, or processor time if `DTRANSFORMER_PROCESSOR` is set."""
    is_processor = os.environ.get("DTRANSFORMER_PROCESSOR")
    return time.process_time() if is_processor else time.perf_counter()


WORKLOADS = {
    "translation": Workload(),
    "wide": Workload(6, 6, hidden_size=512, ffn_hidden_size=2048),
    "language_model": Workload(0, 12, batch_size=8, length=256),
}


def get_workload(name):
    """Return the workload with this name."""
    from generation import Generation
    from published import PUBLISHED
    from sentences import Sentences

    other_workloads = {"greedy": Generation(), "beam_search": Generation(num_beams=4), **PUBLISHED}
    return {**WORKLOADS, **other_workloads, "sentences": Sentences()}[name]


def serve(make_run, num_first=1):
    """Take turns: for each number n on standard input, run n steps and print their seconds.

    Args:
        make_run: Function of the `Workload` and the other command-line arguments. It returns a
            function of n that runs n steps and returns the list of their seconds.
        num_first: Number of single steps before the turns. The `result` attribute of the function is
            printed after them.
    """
    workload, *options = sys.argv[1:]
    start = time.perf_counter()
    run = make_run(get_workload(workload), *options)
    first, *_ = [run(1)[0] for _ in range(num_first)]
    started = {"start_s": time.perf_counter() - start, "first_step_s": first}
    print(json.dumps({**started, "result": getattr(run, "result", None)}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def time_each_step(step):
    """Return a function of n that runs n steps and returns the seconds of each.

    Its `result` attribute is the value of the last step.
    """

    def run(num_steps):
        seconds = []
        for _ in range(num_steps):
            start = clock()
            run.result = step()
            seconds.append(clock() - start)
        return seconds

    return run
