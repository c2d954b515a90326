"""Translation model, weights and sentences of the generating contestants.

All environments import this file, so it needs only NumPy.
"""

import dataclasses

import numpy as np
from workloads import Workload

PAD, START, END = 0, 2, 3


@dataclasses.dataclass(frozen=True)
class Generation(Workload):
    """A post-norm Transformer with ReLU, learned positions and one shared table.

    Args:
        num_beams: Number of hypotheses. `1` is greedy search.
        length: Maximum number of source tokens. Sources have at least a quarter of it.
        num_new_tokens: Number of tokens in every translation. None ends earlier.
    """

    num_beams: int = 1
    num_new_tokens: int = 64

    @property
    def tokens(self):
        return self.batch_size * self.num_new_tokens

    @property
    def passes(self):
        """Number of products for each forward product: generation has no gradients."""
        return 1

    def products(self):
        """Return the minimum dense products of a call, in the format of `Workload.products`.

        Products inside attention are small and differ between contestants, so they do not count.
        """
        h, f, new = self.hidden_size, self.ffn_hidden_size, self.num_new_tokens
        words, rows = self.batch_size * self.length, self.batch_size * self.num_beams
        encoders, decoders = self.encoder_layers, self.decoder_layers
        return {
            (1, words, h, 3 * h): encoders,
            (1, words, h, 2 * h): decoders,  # Keys and values of the encoder output.
            (1, words, h, h): encoders,
            (1, words, h, f): encoders,
            (1, words, f, h): encoders,
            (1, rows, h, 3 * h): decoders * new,
            (1, rows, h, h): 3 * decoders * new,
            (1, rows, h, f): decoders * new,
            (1, rows, f, h): decoders * new,
            (1, rows, h, self.vocab_size): new,
        }

    def sources(self):
        """Return sentences of different lengths, an int array [batch_size, length]."""
        rng = np.random.default_rng(0)
        ids = rng.integers(4, self.vocab_size, (self.batch_size, self.length), "int64")
        lengths = rng.integers(self.length // 4, self.length + 1, self.batch_size)
        lengths[0] = self.length
        ids[np.arange(self.length) >= lengths[:, None]] = PAD
        return ids

    def weights(self):
        """Return a dict of names to arrays. Kernels have shape [inputs, outputs]."""
        rng, h, f = np.random.default_rng(1), self.hidden_size, self.ffn_hidden_size
        shapes = {"table": (self.vocab_size, h), "bias": (self.vocab_size,)}
        num_blocks_by_stack = {"encoder": self.encoder_layers, "decoder": self.decoder_layers}
        for stack, num_blocks in num_blocks_by_stack.items():
            shapes[f"{stack}/positions"] = (self.num_new_tokens + 1, h)
            attentions = ["self"] if stack == "encoder" else ["self", "memory"]
            for block in (f"{stack}/{k}" for k in range(num_blocks)):
                for name in attentions:
                    for part in ("query", "key", "value", "output"):
                        shapes[f"{block}/{name}/{part}/kernel"] = h, h
                        shapes[f"{block}/{name}/{part}/bias"] = (h,)
                shapes[f"{block}/inner/kernel"], shapes[f"{block}/inner/bias"] = (h, f), (f,)
                shapes[f"{block}/outer/kernel"], shapes[f"{block}/outer/bias"] = (f, h), (h,)
                for name in [*attentions, "outer"]:
                    shapes[f"{block}/{name}/gamma"] = shapes[f"{block}/{name}/beta"] = (h,)
        weights_by_name = {}
        for name, shape in shapes.items():
            spread = 0.1 if len(shape) == 1 else (2 / sum(shape[-2:])) ** 0.5
            spread = h**-0.5 if name == "table" else spread
            weights_by_name[name] = rng.normal(name.endswith("gamma"), spread, shape).astype(
                "float32"
            )
        weights_by_name["bias"][:] = 0.0
        weights_by_name["bias"][[PAD, START, END]] = -1e9  # No sentence ends early.
        return weights_by_name
