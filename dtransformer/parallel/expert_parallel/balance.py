"""Balance losses of the router: shares of the global batch's, so that layouts agree.

A trainer takes the mean over sequences of what layers add (see `ForwardStep.added`). So each of
these is the mean over the groups of tokens that are here, or, where they are parts of one group,
that many times this part's summands.
"""

import tensorflow as tf

from dtransformer.parallel.expert_parallel.token_groups import Totals
from dtransformer.parallel.ops.custom_gradient import custom_gradient


def load_balancing(probabilities: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return E · Σᵢ fᵢ · Pᵢ, which is 1 where the load is even.

    fᵢ is the share of choices that are of expert i, which is a constant to gradients, and Pᵢ the
    mean of its probability (Fedus et al., 2021, Switch Transformers, arXiv 2101.03961, §2.2).

    Args:
        probabilities: float32 [g, n, E], 0 where there is padding.
        totals: the groups' `Totals`.
    """
    share = tf.math.divide_no_nan(totals.load, tf.reduce_sum(totals.load, axis=-1, keepdims=True))
    mean = tf.math.divide_no_nan(tf.reduce_sum(probabilities, axis=-2), totals.tokens[..., None])
    num_experts = probabilities.shape[-1]
    each = tf.reduce_sum(tf.stop_gradient(share) * mean, axis=-1)
    return num_experts * tf.reduce_mean(each) * totals.parts


def z_loss(logits: tf.Tensor, is_token: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return the mean of logsumexp² (Zoph et al., 2022, ST-MoE, arXiv 2202.08906, §3.3).

    Args:
        logits: float32 [g, n, E].
        is_token: int64 [g, n], 0 where there is padding.
        totals: the groups' `Totals`.
    """
    square = tf.square(tf.reduce_logsumexp(logits, axis=-1)) * tf.cast(is_token, "float32")
    each = tf.math.divide_no_nan(tf.reduce_sum(square, axis=-1), totals.tokens)
    return tf.reduce_mean(each) * totals.parts


def excess_load(bias: tf.Tensor, totals: Totals) -> tf.Tensor:
    """Return 0, whose gradient of the experts' bias is how far their load is above the mean.

    An optimizer that goes against it makes busy experts less likely to be chosen, without a
    loss that would disturb the others (Wang et al., 2024, arXiv 2408.15664, §3.1, whose step is
    the sign of the same number).

    Args:
        bias: float32 [E].
        totals: the groups' `Totals`.
    """
    all_choices = tf.reduce_sum(totals.load, axis=-1, keepdims=True)
    excess = tf.math.divide_no_nan(totals.load, all_choices) - 1 / bias.shape[0]
    excess = tf.reduce_mean(excess, axis=[*range(len(excess.shape) - 1)])

    @custom_gradient
    def nothing(bias):
        return tf.reduce_sum(bias) * 0.0, lambda upstream: upstream * excess

    return nothing(bias)
