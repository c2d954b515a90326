"""Capacity slots: the plan of a dispatch, of the router's choice alone.

An expert takes so many tokens of a group, in the order of their positions in the global batch: the
same ones are dropped whatever the layout (Lepikhin et al., 2020, GShard, arXiv 2006.16668, §2.2).

Shapes: g groups of tokens, or parts of one, that are here; n tokens of each; E experts; k of them
are chosen for each token.
"""

import math
import typing

import tensorflow as tf

from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE

# Of a quotient that is a whole number, but for rounding.
_ROUNDING = 1e-6


class Places(typing.NamedTuple):
    """Who takes which tokens.

    Args:
        taken: int64 [g, n, E], 1 where the expert takes the token.
        position: int64 [g, n, E], the token's number among those that the expert takes of the
            group here, where it takes it.
    """

    taken: tf.Tensor
    position: tf.Tensor


def capacity(num_tokens: int | tf.Tensor, moe_config) -> int | tf.Tensor | None:
    """Return how many tokens of a group an expert takes: ⌈k · n · factor / E⌉; None for all.

    Args:
        num_tokens: n, padding included.
        moe_config: a `MoEConfig`.

    Example:

    >>> capacity(16, dtransformer.MoEConfig(expert_num=4, capacity_factor=1.25))
    5
    """
    if moe_config.dropless:
        return None
    each = moe_config.num_experts_chosen * moe_config.capacity_factor / moe_config.expert_num
    if isinstance(num_tokens, int):
        return max(1, math.ceil(num_tokens * each - _ROUNDING))
    exact = tf.cast(num_tokens, "float64") * each - _ROUNDING
    return tf.maximum(1, tf.cast(tf.math.ceil(exact), "int32"))


def places(
    chosen: tf.Tensor, most: int | tf.Tensor | None, before: tf.Tensor | None = None
) -> Places:
    """Return which experts take which tokens.

    Args:
        chosen: int64 [g, n, E], 1 where the token is to be sent to the expert.
        most: number of tokens that an expert takes of a group; None for all.
        before: int64 [g, E], the number of tokens of the same group, held elsewhere, that come
            first and are to be sent to the expert; None for none.

    Example:

    >>> sent_to_one_expert = tf.ones((1, 3, 1), "int64")
    >>> places(sent_to_one_expert, most=2).taken.numpy().ravel().tolist()
    [1, 1, 0]
    """
    position = tf.cumsum(chosen, axis=-2, exclusive=True)
    if most is None:
        return Places(chosen, position)
    in_group = position if before is None else position + before[..., None, :]
    return Places(chosen * tf.cast(in_group < tf.cast(most, INDEX_TYPE), INDEX_TYPE), position)
