"""Limits that the layers follow and the planner predicts. This module does not need TensorFlow."""

MAX_LOGIT_BYTES = 2**28
"""Size of the float32 logits that the loss computes together on a device, in chunks of tokens."""
MIN_BLOCKWISE_SCORES = 2048 * 1024
"""Number of scores s·t of a head from which attention is computed blockwise, if possible."""
