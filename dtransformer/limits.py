"""Limits that the layers follow and the planner predicts. This module does not need TensorFlow."""

import numpy as np

MAX_LOGIT_BYTES = 2**28
"""Size of the float32 logits that the loss computes together on a device, in chunks of tokens."""
MIN_CHUNK_TOKENS = 2048
"""Smallest chunk of a large vocabulary.

Each chunk reads and writes the sum of the head's gradients. On an H100 this takes as long as the
products of 600 tokens.
"""
MIN_BLOCKWISE_SCORES = 2048 * 1024
"""Number of scores s·t of a head from which attention is computed blockwise, if possible."""


def max_chunk_tokens(vocab_size: np.ndarray | int) -> np.ndarray | int:
    """Return the number of tokens whose logits a device computes together.

    Args:
        vocab_size: Number of vocabulary entries of a device.
    """
    return np.maximum(MIN_CHUNK_TOKENS, MAX_LOGIT_BYTES // (4 * vocab_size))
