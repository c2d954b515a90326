"""Cross entropy of logits that may be sharded over the vocabulary."""

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.axis_rules import activation_specs, constrain
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.dtensor.layouts import axis_size, relayout


def token_nll(logits, labels, label_smoothing=0.0, vocab_size=None):
    """Return the negative log-likelihood of each label.

    The gradient is written by hand: the softmax is kept once, in the logits' place,
    instead of through each step of its computation. Logits that are cut over the mesh
    along the vocabulary stay so: what devices send each other are numbers of a token
    (Shoeybi et al., 2019, arXiv 1909.08053, §3).

    Args:
        logits: tensor [N, V'].
        labels: int32 tensor [N].
        label_smoothing: ε, in [0, 1).
        vocab_size: V ≤ V'; columns from V on never count.

    Returns:
        A float32 tensor [N] (float64 for float64 logits).
    """
    width = logits.shape[-1]
    vocab_size = vocab_size or width
    on, off = 1.0 - label_smoothing, label_smoothing / vocab_size
    is_entry = tf.range(width) < vocab_size if vocab_size < width else None

    @custom_gradient
    def nll(logits):
        x = tf.cast(logits, "float64" if logits.dtype == "float64" else "float32")
        if is_entry is not None:
            x = tf.where(is_entry, x, x.dtype.min)
        x -= tf.reduce_max(x, axis=-1, keepdims=True)
        exponentials = tf.exp(x)
        total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)
        target = on * entries_at(x, labels)
        if label_smoothing:
            entries = x if is_entry is None else tf.where(is_entry, x, 0.0)
            target += off * tf.reduce_sum(entries, axis=-1)

        def gradient(upstream):
            dx = exponentials * (upstream[:, None] / total)
            if label_smoothing:
                dx -= off * upstream[:, None]
                if is_entry is not None:
                    dx = tf.where(is_entry, dx, 0.0)
            dx = subtract_at(dx, labels, on * upstream)
            return tf.cast(constrain(dx, ("batch", "vocab")), logits.dtype)

        return tf.squeeze(tf.math.log(total), -1) - target, gradient

    return nll(logits)


def entries_at(x, labels):
    """Return the label's entry of each row.

    Args:
        x: tensor [..., V].
        labels: int tensor [...].

    Returns:
        A tensor [...].
    """
    if not trace.is_on_mesh():
        return tf.gather(x, labels, batch_dims=len(labels.shape))
    # Each device picks from its slice of the vocabulary; zeros stand in for labels elsewhere.
    leading = labels.shape.as_list()
    *batch, axis = activation_specs(("batch", *[None] * (len(leading) - 1), "vocab"), x.shape)
    num_slices = axis_size(axis)
    width = x.shape[-1] // num_slices
    slices = relayout(tf.reshape(x, [*leading, num_slices, width]), (*batch, axis, None))
    starts = tf.reshape(width * tf.range(num_slices), [*[1] * len(leading), num_slices])
    numbers = tf.reshape(tf.cast(labels, "int32"), [*leading, 1])
    numbers = relayout(numbers - relayout(starts, (*[None] * len(leading), axis)), (*batch, axis))
    is_here = (numbers >= 0) & (numbers < width)
    entries = tf.gather(slices, tf.where(is_here, numbers, 0), batch_dims=len(leading) + 1)
    entries = tf.where(is_here, entries, tf.zeros([], x.dtype))
    return relayout(tf.reduce_sum(entries, axis=-1), batch)


def subtract_at(x, labels, values):
    """Subtract a value from the label's entry of each row of [N, V]."""
    if not trace.is_on_mesh():
        rows = tf.range(tf.shape(labels)[0])
        return tf.tensor_scatter_nd_sub(x, tf.stack([rows, labels], 1), values)
    # A mask instead of a scatter: along a dimension that is cut, DTensor would gather the whole.
    is_label = tf.range(x.shape[-1]) == labels[:, None]
    return tf.where(is_label, x - values[:, None], x)
