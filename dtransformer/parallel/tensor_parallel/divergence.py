"""Kullback–Leibler divergence of logits that may be sharded over the vocabulary."""

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.tensor_parallel.cross_entropy import logits_axes

DIVERGENCES = ("forward_kl", "reverse_kl")


def token_divergence(
    logits: tf.Tensor,
    teacher_logits: tf.Tensor,
    kind: str = "forward_kl",
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tf.Tensor:
    """Return the divergence between the distributions of a student and a teacher for each token.

    With the student's probabilities q and the teacher's p, both softmax(logits / temperature),
    `"forward_kl"` is Σ p · log(p / q) and `"reverse_kl"` is Σ q · log(q / p).

    The gradient is written by hand and computes both distributions again. Logits that are sharded
    over the vocabulary stay sharded. Teacher logits have no gradient.

    Args:
        logits: Tensor of shape `[..., V']`.
        teacher_logits: Tensor of the same shape.
        kind: `"forward_kl"` or `"reverse_kl"`. Defaults to `"forward_kl"`.
        temperature: Float above 0. Divisor of all logits. Defaults to `1.0`.
        vocab_size: Integer V ≤ V'. Later columns are padding and ignored. Defaults to V'.

    Returns:
        A float32 tensor of shape `[...]`, or float64 for float64 logits.
    """
    width = logits.shape[-1]
    is_entry = tf.range(width) < (vocab_size or width)
    compute_type = "float64" if logits.dtype == "float64" else "float32"

    def log_probabilities(x):
        x = tf.cast(x, compute_type) / temperature
        x = tf.where(is_entry, x, x.dtype.min)
        x -= tf.reduce_max(x, axis=-1, keepdims=True)
        return x - tf.math.log(tf.reduce_sum(tf.exp(x), axis=-1, keepdims=True))

    def log_ratios(logits):
        """Return log q and log(q / p), which is 0 for padding."""
        log_q = log_probabilities(logits)
        return log_q, tf.where(is_entry, log_q - log_probabilities(teacher_logits), 0.0)

    @custom_gradient
    def divergence(logits):
        log_q, log_ratio = log_ratios(logits)
        if kind == "reverse_kl":
            terms = tf.exp(log_q) * log_ratio
        else:
            terms = tf.exp(log_q - log_ratio) * -log_ratio
        value = tf.reduce_sum(terms, axis=-1)

        def gradient(upstream):
            log_q, log_ratio = log_ratios(logits)
            q = tf.exp(log_q)
            if kind == "reverse_kl":
                dx = q * (log_ratio - value[..., None])
            else:
                dx = q - tf.exp(log_q - log_ratio)
            dx *= upstream[..., None] / temperature
            return tf.cast(constrain(dx, logits_axes(dx)), logits.dtype)

        return value, gradient

    return divergence(logits)
