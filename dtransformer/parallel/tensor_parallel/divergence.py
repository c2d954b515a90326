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
    is_reverse = kind == "reverse_kl"

    def log_probabilities(x):
        x = tf.cast(x, compute_type) / temperature
        x = tf.where(is_entry, x, x.dtype.min)
        x -= tf.reduce_max(x, axis=-1, keepdims=True)
        return x - tf.math.log(tf.reduce_sum(tf.exp(x), axis=-1, keepdims=True))

    def compare(logits):
        """Return p, q and log(p / q), which is 0 for padding."""
        log_p = log_probabilities(teacher_logits)
        log_q = log_probabilities(logits)
        return tf.exp(log_p), tf.exp(log_q), tf.where(is_entry, log_p - log_q, 0.0)

    @custom_gradient
    def divergence(logits):
        p, q, log_ratio = compare(logits)
        value = tf.reduce_sum(-q * log_ratio if is_reverse else p * log_ratio, axis=-1)

        def gradient(upstream):
            p, q, log_ratio = compare(logits)
            dx = -q * (log_ratio + value[..., None]) if is_reverse else q - p
            dx *= upstream[..., None] / temperature
            return tf.cast(constrain(dx, logits_axes(dx)), logits.dtype)

        return value, gradient

    return divergence(logits)
