"""Cross entropy over a vocabulary: the mean over the tokens that count."""

import tensorflow as tf

from dtransformer.layers.base import Layer, check_rate, register
from dtransformer.parallel.layout import (
    activation_specs,
    axis_size,
    constrain,
    custom_gradient,
    is_on_mesh,
    pin,
)


@register
class CrossEntropyLoss(Layer):
    """The mean negative log-likelihood of the labels, over the tokens that count.

    With label smoothing ε the target distribution gives 1−ε to the label and ε
    evenly to the V entries (Szegedy et al., 2016, arXiv 1512.00567, §7). Computed in
    float32 at least.

    Args:
        label_smoothing: ε, in [0, 1).
        ignore_id: a label that never counts, such as the padding's.
        vocab_size: the number V of entries, where logits may be wider because they
            are padded; their width by default.

    Call arguments:
        logits: tensor [N, V] or [b, s, V].
        labels: int tensor [N] or [b, s].
        mask: tensor of the labels' shape, the weight of each; None for 1.

    Returns:
        A scalar: Σ nll·mask / Σ mask; 0 where nothing counts.

    Raises:
        ValueError: labels or the mask do not have the logits' leading dimensions.

    Example:

    >>> loss = CrossEntropyLoss(ignore_id=0)
    >>> float(loss(tf.zeros((2, 4)), tf.constant([1, 0]))) == float(tf.math.log(4.0))
    True
    """

    def __init__(self, label_smoothing=0.0, ignore_id=None, vocab_size=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.label_smoothing = check_rate("label_smoothing", label_smoothing)
        self.ignore_id = ignore_id
        self.vocab_size = vocab_size

    def call(self, logits, labels, mask=None):
        values, weights = self.per_token(logits, labels, mask)
        return tf.math.divide_no_nan(tf.reduce_sum(values * weights), tf.reduce_sum(weights))

    def per_token(self, logits, labels, mask=None):
        """Return the loss of each token and its weight, both float32 of the labels' shape."""
        self._check_shapes(logits, labels, mask)
        weights = self.token_weights(labels, mask)
        if self.ignore_id is not None:  # which may be no entry of the vocabulary
            labels = tf.where(labels == self.ignore_id, tf.zeros_like(labels), labels)
        values = token_nll(
            tf.reshape(logits, [-1, logits.shape[-1]]),
            tf.reshape(tf.cast(labels, "int32"), [-1]),
            self.label_smoothing,
            self.vocab_size or logits.shape[-1],
        )
        return tf.reshape(values, tf.shape(labels)), tf.cast(weights, values.dtype)

    def token_weights(self, labels, mask=None):
        """Return the weight of each token, float32 of the labels' shape."""
        weights = tf.ones_like(labels, "float32")
        if mask is not None:
            weights *= with_rank(tf.cast(mask, "float32"), len(labels.shape))
        if self.ignore_id is not None:
            weights = tf.where(labels == self.ignore_id, tf.zeros_like(weights), weights)
        return weights

    def _check_shapes(self, logits, labels, mask):
        for name, tensor in (("labels", labels), ("mask", mask)):
            if tensor is None:
                continue
            leading = logits.shape[: -1 if name == "labels" else len(tensor.shape)]
            if len(tensor.shape) >= len(logits.shape) or not leading.is_compatible_with(
                tensor.shape
            ):
                raise ValueError(
                    f"{name} of shape {tensor.shape} do not fit logits of shape {logits.shape}: "
                    f"expected {logits.shape[:-1]}"
                )

    def compute_output_shape(self, *args, **kwargs):
        return ()

    def get_config(self):
        return {
            **super().get_config(),
            "label_smoothing": self.label_smoothing,
            "ignore_id": self.ignore_id,
            "vocab_size": self.vocab_size,
        }


def with_rank(weights, rank):
    """Return weights, which may be one for each sentence only, with `rank` dimensions."""
    return weights[(..., *[None] * (rank - len(weights.shape)))]


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
            dx = _subtract_at(dx, labels, on * upstream)
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
    if not is_on_mesh():
        return tf.gather(x, labels, batch_dims=len(labels.shape))
    # Each device picks from its slice of the vocabulary; zeros stand in for labels elsewhere.
    leading = labels.shape.as_list()
    *batch, axis = activation_specs(("batch", *[None] * (len(leading) - 1), "vocab"), x.shape)
    num_slices = axis_size(axis)
    width = x.shape[-1] // num_slices
    slices = pin(tf.reshape(x, [*leading, num_slices, width]), (*batch, axis, None))
    starts = tf.reshape(width * tf.range(num_slices), [*[1] * len(leading), num_slices])
    numbers = tf.reshape(tf.cast(labels, "int32"), [*leading, 1])
    numbers = pin(numbers - pin(starts, (*[None] * len(leading), axis)), (*batch, axis))
    is_here = (numbers >= 0) & (numbers < width)
    entries = tf.gather(slices, tf.where(is_here, numbers, 0), batch_dims=len(leading) + 1)
    entries = tf.where(is_here, entries, tf.zeros([], x.dtype))
    return pin(tf.reduce_sum(entries, axis=-1), batch)


def _subtract_at(x, labels, values):
    """Subtract a value from the label's entry of each row of [N, V]."""
    if not is_on_mesh():
        rows = tf.range(tf.shape(labels)[0])
        return tf.tensor_scatter_nd_sub(x, tf.stack([rows, labels], 1), values)
    # A mask instead of a scatter: along a dimension that is cut, DTensor would gather the whole.
    is_label = tf.range(x.shape[-1]) == labels[:, None]
    return tf.where(is_label, x - values[:, None], x)
