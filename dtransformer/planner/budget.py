"""Training budget: default global batch of a plan, and hours for a number of tokens."""

import math

from dtransformer.planner.cost import Cost
from dtransformer.planner.shape import ModelShape

_FINE_TUNING_BATCH = 32  # The default of `training.batch_size`.
_TOKENS_PER_PARAMETER = 20


def optimal_batch_tokens(flops: float) -> float:
    """Return the compute-optimal batch size in tokens: `0.2920 * flops**0.3271`.

    Args:
        flops: Floating-point operations of the whole training.

    Reference:
        [DeepSeek-AI, 2024, section 3.1](https://arxiv.org/abs/2401.02954)
    """
    return 0.2920 * flops**0.3271


def default_batch(
    model: ModelShape, num_devices: int, tokens: float | None = None
) -> tuple[int, str]:
    """Return a global batch and a sentence that explains the choice.

    The batch is compute-optimal for training all weights, and 32 sequences if weights
    are frozen. It is rounded to `num_devices` times a power of two.

    Args:
        model: Shape of the network.
        num_devices: Number of devices.
        tokens: Number of training tokens. Defaults to 20 per parameter
            ([Hoffmann et al., 2022](https://arxiv.org/abs/2203.15556)).

    Returns:
        A `(sequences, reason)` tuple.

    Example:

    >>> from dtransformer.planner.models import get_model
    >>> default_batch(get_model("llama2_7b"), 8)[0]
    1024
    """
    length = model.sequence_length
    if model.trained_parameters() < model.parameters():
        target = _FINE_TUNING_BATCH
        rule = "the default of training.batch_size, as weights are frozen"
    else:
        budget = tokens or _TOKENS_PER_PARAMETER * model.parameters()
        flops = model.flops_per_sequence() / length * budget
        target = optimal_batch_tokens(flops) / length
        origin = "--tokens" if tokens else f"{_TOKENS_PER_PARAMETER} per parameter"
        rule = (
            f"the compute-optimal batch for {budget / 1e9:,.3g} B tokens ({origin}; DeepSeek-AI, "
            "2024, arXiv 2401.02954)"
        )
    multiple = f" times {num_devices} devices" if num_devices > 1 else ""
    doublings = max(round(math.log2(target / num_devices)), 0)
    sequences = num_devices * 2**doublings
    reason = (
        f"Global batch: {sequences:,} sequences, {sequences * length:,} tokens. --global-batch is "
        f"missing, so this is {rule}, rounded to a power of two{multiple}."
    )
    return sequences, reason


def training_hours(cost: Cost, tokens: float) -> float:
    """Return the hours that training on `tokens` tokens takes."""
    return tokens / cost.tokens_per_second / 3600
