"""Tokens to experts and back, as the layout asks for."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.expert_parallel.buffers import Buffers
from dtransformer.parallel.expert_parallel.capacity_slots import Places
from dtransformer.parallel.expert_parallel.sorted_tokens import SortedTokens
from dtransformer.parallel.expert_parallel.token_groups import TokenGroups
from dtransformer.parallel.tracing import trace


def apply_experts(
    feed_forward: Callable,
    x: tf.Tensor,
    taken: Places,
    choices: tf.Tensor,
    gates: tf.Tensor,
    groups: TokenGroups,
    most: int | tf.Tensor | None,
) -> tf.Tensor:
    """Return Σ gate · expert(x) of each token.

    Args:
        feed_forward: a function of (products, list of tokens) that returns a list alike: `products`
            has `column_parallel`, `row_parallel` and `add_bias`, which compute for each expert.
        x: tensor [g, n, h].
        taken: the `Places` of the tokens.
        choices: int64 [g, n, k].
        gates: float32 [g, n, k].
        groups: the `TokenGroups`.
        most: number of tokens that an expert takes of a group; None for all.

    Returns:
        A tensor [g, n, h].
    """
    # Where XLA compiles, shapes have to be known. Its clusters can leave out what depends on values,
    # which costs less than to pad each expert that has no bound to all tokens.
    in_clusters = most is not None and tf.config.optimizer.get_jit()
    if trace.is_on_mesh() or _compat.is_compiled_by_xla() or in_clusters:
        experts = Buffers(taken, choices, groups, most)
    else:
        experts = SortedTokens(taken, choices)
    return experts.take_back(feed_forward(experts, experts.send(x)), gates)
