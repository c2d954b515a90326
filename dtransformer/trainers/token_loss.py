"""A loss as what every layout needs of it: a value and a weight for each token."""

import keras
import tensorflow as tf

from dtransformer.layers.loss import CrossEntropyLoss, with_rank
from dtransformer.parallel.tensor_parallel.cross_entropy import label_values

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def as_token_loss(loss, vocab_size=None):
    """Return a loss with the method `per_token`.

    Args:
        loss: a `CrossEntropyLoss`, or any other object with its `per_token` and
            `token_weights`, or a Keras loss, its name, or a function of (y_true, y_pred)
            that returns a value for each sample or token.
        vocab_size: size of the vocabulary, where logits may be padded to
            more; for a `CrossEntropyLoss` that does not know it.

    Raises:
        ValueError: the loss is none of these, or does not reduce to a mean.
    """
    if vocab_size and isinstance(loss, CrossEntropyLoss) and loss.vocab_size is None:
        return type(loss).from_config({**loss.get_config(), "vocab_size": vocab_size})
    if hasattr(loss, "per_token"):
        return loss
    if isinstance(loss, (dict, list, tuple)):
        raise ValueError("the trainer takes one loss for one output; sum losses in a function")
    return KerasTokenLoss(keras.losses.get(loss))


class KerasTokenLoss:
    """A Keras loss: the mean of its values, weighted by the sample weights.

    Args:
        loss: a `keras.losses.Loss`, or a function of (y_true, y_pred).
    """

    def __init__(self, loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEANS:
            raise ValueError(
                f"the loss {getattr(loss, 'name', loss)!r} has reduction={reduction!r}; the trainer "
                f"takes the mean over the global batch, so use one of {', '.join(_MEANS)}"
            )
        self.function = loss.call if isinstance(loss, keras.losses.Loss) else loss
        self.dtype = getattr(loss, "dtype", None) or keras.config.floatx()

    def per_token(self, outputs, labels, sample_weight=None):
        """Return the loss of each sample or token and its weight."""
        mask = getattr(outputs, "_keras_mask", None)
        if not tf.as_dtype(labels.dtype).is_integer:
            labels = tf.cast(labels, self.dtype)
        values = self.function(labels, tf.cast(outputs, self.dtype))
        weights = tf.ones_like(values)
        for weight in (sample_weight, mask):
            if weight is not None:
                weights *= with_rank(tf.cast(weight, values.dtype), len(values.shape))
        return values, weights


def hits(outputs, labels):
    """Return 1 where the label is the most likely class, 0 elsewhere.

    Args:
        outputs: tensor [..., V].
        labels: int tensor [...].

    Returns:
        A float32 tensor [...], or None where outputs and labels are not those of a
        classifier.
    """
    is_class = tf.as_dtype(labels.dtype).is_integer and len(outputs.shape) == len(labels.shape) + 1
    if not is_class:
        return None
    best = tf.reduce_max(outputs, axis=-1)
    own = label_values(outputs, tf.maximum(labels, 0))
    return tf.cast(own >= best, "float32")
