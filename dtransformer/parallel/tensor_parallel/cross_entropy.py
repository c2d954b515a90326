"""Cross entropy of logits that may be sharded over the vocabulary."""

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import activation_specs, axis_size, constrain, relayout
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.fused import fused
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.embedding import look_up_in_shards
from dtransformer.parallel.tracing import trace


def token_nll(
    logits: tf.Tensor,
    labels: tf.Tensor,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    z_loss: float = 0.0,
) -> tf.Tensor:
    """Return the negative log-likelihood of each label.

    The gradient is written by hand. It computes the softmax again from the logits, in any type, and
    finds labels by comparison, so a compiler reads the logits three times and stores no other
    tensor of their shape. Logits that are sharded over the vocabulary stay sharded; devices
    exchange a few floats per token ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053),
    section 3).

    Args:
        logits: Tensor of shape `[..., V']`.
        labels: Integer tensor of shape `[...]`.
        label_smoothing: Float ε in [0, 1). Defaults to `0.0`.
        vocab_size: Integer V ≤ V'. Later columns are padding and ignored. Defaults to V'.
        z_loss: Float. Factor of logsumexp², which is added
            ([Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311), section 5). Defaults to
            `0.0`.

    Returns:
        A float32 tensor of shape `[...]`, or float64 for float64 logits.
    """
    if not trace.is_on_mesh() and len(labels.shape) != 1:
        flat = tf.reshape(logits, [-1, logits.shape[-1]])
        values = token_nll(flat, tf.reshape(labels, [-1]), label_smoothing, vocab_size, z_loss)
        return tf.reshape(values, tf.shape(labels))
    width = logits.shape[-1]
    labels = tf.cast(labels, INDEX_TYPE)
    vocab_size = vocab_size or width
    on = 1.0 - label_smoothing
    off = label_smoothing / vocab_size
    is_entry = tf.range(width) < vocab_size if vocab_size < width else None
    compute_type = "float64" if logits.dtype == "float64" else "float32"

    def entries(logits, fill):
        """Return the logits in the compute type, with padded columns set to `fill`."""
        x = tf.cast(logits, compute_type)
        return x if is_entry is None else tf.where(is_entry, x, tf.cast(fill, x.dtype))

    def statistics(logits):
        x = entries(logits, logits.dtype.min)
        max_logits = tf.reduce_max(x, axis=-1, keepdims=True)
        return max_logits, tf.reduce_sum(tf.exp(x - max_logits), axis=-1, keepdims=True)

    @custom_gradient
    def nll(logits):
        max_logits, sum_exp = fused(statistics)(logits)
        z = tf.math.log(sum_exp) + max_logits
        label_logits = tf.cast(label_values(logits, labels), compute_type)
        target = on * (label_logits - tf.squeeze(max_logits, -1))
        if label_smoothing:
            target += off * tf.reduce_sum(entries(logits, max_logits) - max_logits, axis=-1)

        def gradient(upstream, logits):
            upstream = upstream[..., None]
            scale = upstream * (1 + 2 * z_loss * z) if z_loss else upstream
            dx = tf.exp(entries(logits, logits.dtype.min) - max_logits) * (scale / sum_exp)
            if label_smoothing:
                smoothed = dx - off * upstream
                dx = smoothed if is_entry is None else tf.where(is_entry, smoothed, 0.0)
            is_label = tf.range(width, dtype=INDEX_TYPE) == labels[..., None]
            dx = tf.where(is_label, dx - on * upstream, dx)
            return tf.cast(constrain(dx, logits_axes(dx)), logits.dtype)

        value = tf.squeeze(tf.math.log(sum_exp), -1) - target
        if z_loss:
            value += z_loss * tf.square(tf.squeeze(z, -1))
        return value, lambda upstream: fused(gradient)(upstream, logits)

    return nll(logits)


def label_values(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the element of each label: `tf.gather` that also works on sharded tensors.

    Args:
        x: Tensor of shape `[..., V]`.
        labels: Integer tensor of shape `[...]`.

    Returns:
        A tensor of shape `[...]`.
    """
    if not trace.is_on_mesh():
        return tf.gather(x, labels, batch_dims=len(labels.shape))
    leading = labels.shape.as_list()
    *batch, axis = activation_specs(logits_axes(x), x.shape)
    # [..., V] -> [..., t, V/t] -> [..., t] -> [...]
    num_shards = axis_size(axis)
    shards = tf.reshape(x, [*leading, num_shards, x.shape[-1] // num_shards])
    shards = relayout(shards, (*batch, axis, None))
    values = look_up_in_shards(shards, labels, -2, (*batch, axis))
    return relayout(tf.reduce_sum(values, axis=-1), batch)


def is_most_likely(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return 1 where the label has the highest logit, otherwise 0.

    Args:
        logits: Tensor of shape `[..., V]`.
        labels: Integer tensor of shape `[...]`.

    Returns:
        A float32 tensor of shape `[...]`.
    """
    max_logit = tf.reduce_max(logits, axis=-1)
    return tf.cast(label_values(logits, labels) >= max_logit, "float32")


def logits_axes(logits: tf.Tensor) -> tuple:
    """Return the logical axes of logits `[N, V]`, `[b, s, V]` or `[b, ..., V]`."""
    between = ("inner_length", *[None] * (len(logits.shape) - 3)) if len(logits.shape) > 2 else ()
    return ("batch", *between, "vocab")
