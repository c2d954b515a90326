"""Loss of one output, computed in parts that sum to the loss of the global batch.

Supports Keras losses with any of their reductions, and token losses such as `CrossEntropyLoss`.
"""

import typing

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.loss import expand_to_rank

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class LabelCounts(typing.NamedTuple):
    """Counts of an output's labels in the global batch, known before the forward pass.

    Args:
        size: Number of labels.
        weights: Sum of the sample weights. Negative without sample weights.
        tokens: Sum of the weights of weighted tokens. 0 if the loss is not a token loss.
    """

    size: tf.Tensor
    weights: tf.Tensor
    tokens: tf.Tensor


def check_range(ids: tf.Tensor, name: str, size: int | None) -> tf.Operation:
    """Return an operation that fails if an id is out of range.

    `convert_step_errors` converts the failure to a one-line `ValueError`.

    Args:
        ids: Integer tensor [...].
        name: String that names the ids in the error.
        size: Integer. Valid ids are from 0 to `size - 1`. `None` only excludes negative ids.
    """
    lowest = tf.reduce_min(ids)
    highest = tf.reduce_max(ids)
    is_inside = (lowest >= 0) | (tf.size(ids) == 0)
    expected = "0 or more"
    if size is not None:
        is_inside &= (highest < size) | (tf.size(ids) == 0)
        expected = f"0 to {size - 1}"
    line = f"dtransformer: The {name} must be {expected}. The batch has the range"
    return tf.debugging.Assert(is_inside, [line, lowest, highest])


class LossTerm(typing.NamedTuple):
    """The local part of a loss.

    Args:
        loss: Local part of the loss: Σ values · weights / normalizer.
        normalizer_ratio: Local part of the true loss normalizer divided by the assumed one, if the
            true one is only known after the forward pass. Otherwise `None`.
        weights: Weight of each value, or `None` if all weights are 1.
        parts: Dict from names to local parts of terms of the loss, for the logs.
    """

    loss: tf.Tensor
    normalizer_ratio: tf.Tensor | None
    weights: tf.Tensor | None
    parts: dict[str, tf.Tensor]


def check_loss(loss) -> None:
    """Check that a loss can be computed in parts and summed.

    Args:
        loss: A `keras.losses.Loss`, or another callable, which is not checked.

    Raises:
        ValueError: If the loss overrides `__call__`, or if its reduction is not a sum or a mean.
    """
    if not isinstance(loss, keras.losses.Loss):
        return
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(
            f"The loss {type(loss).__name__} overrides __call__, so its value cannot be summed "
            "over the ranks' parts of a batch. Define call(y_true, y_pred), which returns the loss "
            "of each sample, and set a reduction."
        )
    if loss.reduction not in (*_MEANS, "sum"):
        raise ValueError(
            f"The loss {loss.name!r} has `reduction={loss.reduction!r}`, which does not return a "
            f"scalar. Use one of {', '.join((*_MEANS, 'sum'))}."
        )


def loss_term(
    loss, labels, outputs, sample_weight, label_counts: LabelCounts, is_full_batch: bool
) -> LossTerm:
    """Return the local part of one output's loss.

    Args:
        loss: A `keras.losses.Loss`, or an object with `per_token(outputs, labels, weights)`.
        labels, outputs: Tensors [b, ...].
        sample_weight: Tensor [b, ...] or `None`.
        label_counts: `LabelCounts` of the labels in the global batch.
        is_full_batch: Whether these rows are the global batch.

    Raises:
        ValueError: If the loss returns one value for all rows and has sample weights or a mask.
    """
    parts = {}
    if hasattr(loss, "per_token"):
        values, weights = loss.per_token(outputs, labels, sample_weight)
        mask = _compat.get_keras_mask(outputs)
        if mask is not None:
            weights = _apply_weights(weights, tf.cast(mask, weights.dtype))
        local_normalizer = tf.reduce_sum(tf.cast(weights, "float32"))
        normalizer = label_counts.tokens
        is_known = hasattr(loss, "token_weights") and mask is None
        values *= tf.cast(weights, values.dtype)
        parts = getattr(outputs, "loss_parts", {})
        parts = {name: part * tf.cast(weights, part.dtype) for name, part in parts.items()}
    else:
        values, weights, local_normalizer = _keras_values(
            loss, labels, outputs, sample_weight, is_full_batch
        )
        normalizer = _normalizer(loss.reduction, values, labels, label_counts)
        is_known = local_normalizer is None
        if not values.shape.rank:  # A single value, such as a mean.
            values = tf.math.multiply_no_nan(values, tf.cast(tf.size(labels), values.dtype))
    if not is_known and is_full_batch:
        normalizer = local_normalizer
        is_known = True

    def mean(x):
        return tf.math.divide_no_nan(tf.reduce_sum(tf.cast(x, "float32")), normalizer)

    ratio = None if is_known else tf.math.divide_no_nan(local_normalizer, normalizer)
    return LossTerm(mean(values), ratio, weights, {name: mean(x) for name, x in parts.items()})


def _keras_values(loss, labels, outputs, sample_weight, is_full_batch):
    """Return a Keras loss' weighted values, their weights, and the sum of the weights.

    The sum is `None` if it is known before the forward pass.
    """

    def cast(x):
        return tf.cast(x, loss.dtype)

    output_mask = _compat.get_keras_mask(outputs)
    values = loss.call(
        keras.tree.map_structure(cast, labels), keras.tree.map_structure(cast, outputs)
    )
    masks = [mask for mask in (output_mask, _compat.get_keras_mask(values)) if mask is not None]
    values = cast(values)
    weights = None
    normalizer = None
    if masks:
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        weights = cast(mask)
        normalizer = tf.reduce_sum(tf.cast(mask, "float32"))
    if sample_weight is not None:
        sample_weight = cast(sample_weight)
        weights = sample_weight if weights is None else _apply_weights(weights, sample_weight)
        if normalizer is not None and loss.reduction == "mean_with_sample_weight":
            normalizer = tf.reduce_sum(tf.cast(weights, "float32"))
    if weights is not None:
        if not values.shape.rank and not is_full_batch:
            raise ValueError(
                f"The loss {loss.name!r} returns one value for all rows, so sample weights or a "
                "mask cannot be applied when ranks or micro-batches divide the rows. Return the "
                "loss of each row."
            )
        values = _apply_weights(values, weights)
    return values, weights, None if loss.reduction == "sum" else normalizer


def _normalizer(reduction, values, labels, label_counts):
    """Return the loss normalizer, as far as it is known before the forward pass."""
    if reduction == "sum":
        return tf.ones([])
    values_per_label = 1.0
    if values.shape.rank:
        size = tf.cast(tf.size(labels), "float32")
        values_per_label = tf.math.divide_no_nan(tf.cast(tf.size(values), "float32"), size)
    num_values = label_counts.size * values_per_label
    if reduction != "mean_with_sample_weight":
        return num_values
    return tf.where(label_counts.weights < 0, num_values, label_counts.weights)


def _apply_weights(values, weights):
    """Return values times weights, with Keras' rules for broadcasting.

    A last dimension of size 1 that only one of them has is removed. Weights of a lower rank apply
    to the first dimensions.
    """
    rank = values.shape.rank
    weight_rank = weights.shape.rank
    if weight_rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    elif rank == weight_rank + 1 and values.shape[-1] == 1 and weight_rank > 1:
        values = tf.squeeze(values, -1)
    return values * expand_to_rank(weights, len(values.shape))
