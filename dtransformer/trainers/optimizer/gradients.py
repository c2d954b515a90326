"""Gradients of weights that the loss does not depend on."""

import warnings
from collections.abc import Callable

from dtransformer.parallel.runtime import job


def with_zeros(weights: list, gradients: list, zeros: Callable) -> list:
    """Replace missing gradients by zeros. Warn once per data-parallel group.

    Args:
        weights: List of Keras variables.
        gradients: List of tensors. `None` for a weight that the loss does not depend on.
        zeros: Function of a weight's index that returns a gradient of zeros.

    Returns:
        A list of tensors.
    """
    unused = [w.path for w, gradient in zip(weights, gradients) if gradient is None]
    if unused and not job.data_shard()[0]:
        warnings.warn(
            f"The loss does not depend on the weights {', '.join(unused)}. Only weight decay "
            "changes them. Check that compile received a loss for each output.",
            stacklevel=2,
        )
    return [zeros(i) if gradient is None else gradient for i, gradient in enumerate(gradients)]
