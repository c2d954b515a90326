"""Balance losses of the router, normalized over the global batch so that all layouts agree.

A trainer averages the losses of layers over sequences (see `ForwardStep.added_loss`). Each loss is
therefore the mean over the local groups. If the local tokens are part of one group, it is this
part's summand times the number of parts.
"""

import tensorflow as tf

from dtransformer.parallel.expert_parallel.token_groups import Totals
from dtransformer.parallel.ops.custom_gradient import custom_gradient


def load_balancing(probabilities: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return E · Σᵢ fᵢ · Pᵢ, which is 1 for an even load.

    fᵢ is the fraction of choices of expert i, a constant for gradients, and Pᵢ the mean of its
    probability.

    Reference:
        Fedus et al., 2021, Switch Transformers, arXiv 2101.03961, §2.2.

    Args:
        probabilities: float32 tensor `[g, n, E]`. 0 for padding.
        totals: `Totals` of the groups.
    """
    fraction = tf.math.divide_no_nan(
        totals.load, tf.reduce_sum(totals.load, axis=-1, keepdims=True)
    )
    mean = tf.math.divide_no_nan(tf.reduce_sum(probabilities, axis=-2), totals.tokens[..., None])
    num_experts = probabilities.shape[-1]
    group_losses = tf.reduce_sum(tf.stop_gradient(fraction) * mean, axis=-1)
    return num_experts * tf.reduce_mean(group_losses) * totals.parts


def z_loss(logits: tf.Tensor, is_token: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return the mean of logsumexp² over tokens.

    Reference:
        Zoph et al., 2022, ST-MoE, arXiv 2202.08906, §3.3.

    Args:
        logits: float32 tensor `[g, n, E]`.
        is_token: int64 tensor `[g, n]`. 0 for padding.
        totals: `Totals` of the groups.
    """
    square = tf.square(tf.reduce_logsumexp(logits, axis=-1)) * tf.cast(is_token, "float32")
    group_losses = tf.math.divide_no_nan(tf.reduce_sum(square, axis=-1), totals.tokens)
    return tf.reduce_mean(group_losses) * totals.parts


def excess_load(bias: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return 0, with the experts' load above the mean as gradient of the bias.

    An optimizer step against it makes busy experts less likely without a loss that disturbs other
    weights.

    Reference:
        Wang et al., 2024, arXiv 2408.15664, §3.1. Their step is the sign of this gradient.

    Args:
        bias: float32 tensor `[E]`.
        totals: `Totals` of the groups.
    """
    all_choices = tf.reduce_sum(totals.load, axis=-1, keepdims=True)
    excess = tf.math.divide_no_nan(totals.load, all_choices) - 1 / bias.shape[0]
    excess = tf.reduce_mean(excess, axis=[*range(len(excess.shape) - 1)])

    @custom_gradient
    def nothing(bias):
        return tf.reduce_sum(bias) * 0.0, lambda upstream: upstream * excess

    return nothing(bias)
