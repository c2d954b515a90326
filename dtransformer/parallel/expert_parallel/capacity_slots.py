"""Capacity slots: plan of the dispatch from the router's choices.

An expert accepts a limited number of tokens of a group, in the order of their positions in the
global batch. Therefore every layout drops the same tokens (Lepikhin et al., 2020, GShard, arXiv
2006.16668, §2.2).

Shapes: g local groups of tokens, or parts of one; n tokens per group; E experts; k choices per
token.
"""

import math
import typing

import tensorflow as tf

from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE

# Tolerance for rounding errors of a quotient that is an integer.
_ROUNDING = 1e-6


class Places(typing.NamedTuple):
    """Tokens accepted by each expert.

    Args:
        accepted: int64 tensor `[g, n, E]`. 1 if the expert accepts the token.
        position: int64 tensor `[g, n, E]`. Index of the token among the tokens that chose the
            expert in the local part of the group.
    """

    accepted: tf.Tensor
    position: tf.Tensor


def capacity(num_tokens: int | tf.Tensor, moe_config) -> int | tf.Tensor | None:
    """Return the capacity ⌈k · n · factor / E⌉ of an expert per group, or `None` if unlimited.

    Args:
        num_tokens: Integer or scalar tensor. Number n of tokens of a group with padding.
        moe_config: `MoEConfig`.

    Example:

    >>> capacity(16, dtransformer.MoEConfig(expert_num=4, capacity_factor=1.25))
    5
    """
    if moe_config.dropless:
        return None
    per_token = moe_config.num_experts_chosen * moe_config.capacity_factor / moe_config.expert_num
    if isinstance(num_tokens, int):
        return max(1, math.ceil(num_tokens * per_token - _ROUNDING))
    exact = tf.cast(num_tokens, "float64") * per_token - _ROUNDING
    return tf.maximum(1, tf.cast(tf.math.ceil(exact), "int32"))


def places(
    chosen: tf.Tensor, max_tokens: int | tf.Tensor | None, before: tf.Tensor | None = None
) -> Places:
    """Return the tokens that each expert accepts.

    Args:
        chosen: int64 tensor `[g, n, E]`. 1 if the token chose the expert.
        max_tokens: Capacity of an expert per group. `None` means unlimited.
        before: int64 tensor `[g, E]`. Number of earlier tokens of the same group, on other devices,
            that chose the expert. `None` means 0.

    Returns:
        `Places`.

    Example:

    >>> sent_to_one_expert = tf.ones((1, 3, 1), "int64")
    >>> places(sent_to_one_expert, max_tokens=2).accepted.numpy().ravel().tolist()
    [1, 1, 0]
    """
    position = tf.cumsum(chosen, axis=-2, exclusive=True)
    if max_tokens is None:
        return Places(chosen, position)
    in_group = position if before is None else position + before[..., None, :]
    return Places(
        chosen * tf.cast(in_group < tf.cast(max_tokens, INDEX_TYPE), INDEX_TYPE), position
    )
