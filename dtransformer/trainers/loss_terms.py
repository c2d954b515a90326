"""Loss of one output, computed in parts that sum to the loss of the global batch.

Supports Keras losses with any of their reductions, and token losses such as `CrossEntropyLoss`.
"""

import typing

import keras
import tensorflow as tf

from dtransformer import _compat

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Counted(typing.NamedTuple):
    """Counts of an output's labels in the global batch, known before the forward pass.

    Args:
        size: Number of labels.
        weights: Sum of the sample weights. Negative without sample weights.
        tokens: Sum of the weights of weighted tokens. 0 if the loss is not a token loss.
    """

    size: tf.Tensor
    weights: tf.Tensor
    tokens: tf.Tensor


def check_range(ids: tf.Tensor, what: str, size: int | None) -> tf.Operation:
    """Return an operation that fails if an id is out of range.

    `errors_in_one_line` converts the failure to a one-line `ValueError`.

    Args:
        ids: Integer tensor [...].
        what: String that names the ids in the error.
        size: Integer. Valid ids are from 0 to `size - 1`. `None` only excludes negative ids.
    """
    lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
    is_inside = (lowest >= 0) | (tf.size(ids) == 0)
    expected = "0 or more"
    if size is not None:
        is_inside &= (highest < size) | (tf.size(ids) == 0)
        expected = f"0 to {size - 1}"
    line = f"dtransformer: The {what} must be {expected}. The batch has the range"
    return tf.debugging.Assert(is_inside, [line, lowest, highest])


class Share(typing.NamedTuple):
    """The local part of a loss.

    Args:
        loss: Local part of the loss: Σ values · weights / divisor.
        divided: Local part of the true loss normalizer divided by the assumed one, if the true one
            is only known after the forward pass. Otherwise `None`.
        weights: Weight of each value, or `None` if all weights are 1.
    """

    loss: tf.Tensor
    divided: tf.Tensor | None
    weights: tf.Tensor | None


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


def share_of(loss, labels, outputs, sample_weight, counted: Counted, own_is_all: bool) -> Share:
    """Return the local part of one output's loss.

    Args:
        loss: A `keras.losses.Loss`, or an object with `per_token(outputs, labels, weights)`.
        labels, outputs: Tensors [b, ...].
        sample_weight: Tensor [b, ...] or `None`.
        counted: `Counted` of the labels in the global batch.
        own_is_all: Whether these rows are the global batch.

    Raises:
        ValueError: If the loss returns one value for all rows and has sample weights or a mask.
    """
    if hasattr(loss, "per_token"):
        values, weights = loss.per_token(outputs, labels, sample_weight)
        mask = _compat.mask_of(outputs)
        if mask is not None:
            weights = _product(weights, tf.cast(mask, weights.dtype))
        own = tf.reduce_sum(tf.cast(weights, "float32"))
        divisor, is_known = counted.tokens, hasattr(loss, "token_weights") and mask is None
        values *= tf.cast(weights, values.dtype)
    else:
        values, weights, own = _keras_values(loss, labels, outputs, sample_weight, own_is_all)
        divisor, is_known = _divisor(loss.reduction, values, labels, counted), own is None
        if not values.shape.rank:  # A single value, such as a mean.
            values = tf.math.multiply_no_nan(values, tf.cast(tf.size(labels), values.dtype))
    if not is_known and own_is_all:
        divisor, is_known = own, True
    total = tf.reduce_sum(tf.cast(values, "float32"))
    divided = None if is_known else tf.math.divide_no_nan(own, divisor)
    return Share(tf.math.divide_no_nan(total, divisor), divided, weights)


def _keras_values(loss, labels, outputs, sample_weight, own_is_all):
    """Return a Keras loss' weighted values, their weights, and the sum of the weights.

    The sum is `None` if it is known before the forward pass.
    """
    in_mask = _compat.mask_of(outputs)
    cast = lambda x: tf.cast(x, loss.dtype)
    values = loss.call(
        keras.tree.map_structure(cast, labels), keras.tree.map_structure(cast, outputs)
    )
    masks = [mask for mask in (in_mask, _compat.mask_of(values)) if mask is not None]
    values, weights, own = cast(values), None, None
    if masks:
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        weights = cast(mask)
        own = tf.reduce_sum(tf.cast(mask, "float32"))
    if sample_weight is not None:
        weights = cast(sample_weight) if weights is None else _product(weights, cast(sample_weight))
        if own is not None and loss.reduction == "mean_with_sample_weight":
            own = tf.reduce_sum(tf.cast(weights, "float32"))
    if weights is not None:
        if not values.shape.rank and not own_is_all:
            raise ValueError(
                f"The loss {loss.name!r} returns one value for all rows, so sample weights or a "
                "mask cannot be applied when ranks or micro-batches divide the rows. Return the "
                "loss of each row."
            )
        values = _product(values, weights)
    return values, weights, own if loss.reduction != "sum" else None


def _divisor(reduction, values, labels, counted):
    """Return the loss normalizer, as far as it is known before the forward pass."""
    if reduction == "sum":
        return tf.ones([])
    each = 1.0
    if values.shape.rank:
        size = tf.cast(tf.size(labels), "float32")
        each = tf.math.divide_no_nan(tf.cast(tf.size(values), "float32"), size)
    number = counted.size * each
    if reduction != "mean_with_sample_weight":
        return number
    return tf.where(counted.weights < 0, number, counted.weights)


def _product(values, weights):
    """Return values times weights, with Keras' rules for broadcasting.

    A last dimension of size 1 that only one of them has is removed. Weights of a lower rank apply
    to the first dimensions.
    """
    rank, others = values.shape.rank, weights.shape.rank
    if others == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    elif rank == others + 1 and values.shape[-1] == 1 and others > 1:
        values = tf.squeeze(values, -1)
    if weights.shape.rank < (values.shape.rank or 0):
        weights = weights[(..., *[None] * (values.shape.rank - weights.shape.rank))]
    return values * weights
