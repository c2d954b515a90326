"""One loss of one output as shares of the global batch's, which add up over ranks and micro-batches.

Keras' losses, by their own reductions, and losses of tokens, such as `CrossEntropyLoss`.
"""

import typing

import keras
import tensorflow as tf

from dtransformer import _compat

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Counted(typing.NamedTuple):
    """What is known of the labels of an output before the forward pass, over the global batch.

    Args:
        size: number of labels.
        weights: sum of the sample weights; less than 0 where there are none.
        tokens: sum of the weights of the tokens that count; 0 where the loss is not of tokens.
    """

    size: tf.Tensor
    weights: tf.Tensor
    tokens: tf.Tensor


def check_range(ids: tf.Tensor, what: str, size: int | None) -> tf.Operation:
    """Check in a step that numbers are those of entries.

    Args:
        ids: int tensor [...].
        what: what they are, for the error.
        size: number of entries; None where it is not known.

    Returns:
        An operation, which fails with what `errors_in_one_line` makes one line of.
    """
    lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
    is_inside = (lowest >= 0) | (tf.size(ids) == 0)
    expected = "0 or more"
    if size is not None:
        is_inside &= (highest < size) | (tf.size(ids) == 0)
        expected = f"0 to {size - 1}"
    line = f"dtransformer: {what}, expected {expected}; the least and the greatest of the batch are"
    return tf.debugging.Assert(is_inside, [line, lowest, highest])


class Share(typing.NamedTuple):
    """This share's part of a loss.

    Args:
        loss: its part of the loss: Σ values · weights / divisor.
        divided: its part of what the sum should have been divided by, over what it was divided
            by, where the first is only known after the forward pass; else None.
        weights: the weight of each value, as far as it is known; None for 1.
    """

    loss: tf.Tensor
    divided: tf.Tensor | None
    weights: tf.Tensor | None


def check_loss(loss) -> None:
    """Check that a loss is the sum of its parts.

    Args:
        loss: a `keras.losses.Loss`, or another callable.

    Raises:
        ValueError: it is not, or nothing is known of how it is made; names it.
    """
    if not isinstance(loss, keras.losses.Loss):
        return
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(
            f"the loss {type(loss).__name__} has a __call__ of its own, of which the parts that "
            "ranks compute cannot be added up: define call(y_true, y_pred), which returns the "
            "loss of each sample, and choose a reduction"
        )
    if loss.reduction not in (*_MEANS, "sum"):
        raise ValueError(
            f"the loss {loss.name!r} has reduction={loss.reduction!r}, which gives no scalar to "
            f"minimize: use one of {', '.join((*_MEANS, 'sum'))}"
        )


def share_of(loss, labels, outputs, sample_weight, counted: Counted, own_is_all: bool) -> Share:
    """Return this share's part of a loss of one output.

    Args:
        loss: a `keras.losses.Loss`, or an object with `per_token(outputs, labels, weights)`.
        labels, outputs: tensors [b, ...]
        sample_weight: tensor [b, ...] or None.
        counted: a `Counted`.
        own_is_all: whether this share is the global batch.

    Raises:
        ValueError: the loss has one value for all rows, and they have weights.
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
        if not values.shape.rank:  # one value for all rows, as a mean is
            values = tf.math.multiply_no_nan(values, tf.cast(tf.size(labels), values.dtype))
    if not is_known and own_is_all:
        divisor, is_known = own, True
    total = tf.reduce_sum(tf.cast(values, "float32"))
    divided = None if is_known else tf.math.divide_no_nan(own, divisor)
    return Share(tf.math.divide_no_nan(total, divisor), divided, weights)


def _keras_values(loss, labels, outputs, sample_weight, own_is_all):
    """Return values with their weights, the weights, and what they sum to where masks tell it."""
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
                f"the loss {loss.name!r} gives one value for all rows, which sample weights or a "
                "mask cannot weigh where ranks or micro-batches share the rows: let it return "
                "the loss of each row"
            )
        values = _product(values, weights)
    return values, weights, own if loss.reduction != "sum" else None


def _divisor(reduction, values, labels, counted):
    """Return what a loss' sum is divided by, as far as it is known before the forward pass."""
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
    """Return values times weights, which may have a last dimension of 1 more, or fewer at all."""
    rank, others = values.shape.rank, weights.shape.rank
    if others == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    elif rank == others + 1 and values.shape[-1] == 1 and others > 1:
        values = tf.squeeze(values, -1)
    if weights.shape.rank < (values.shape.rank or 0):
        weights = weights[(..., *[None] * (values.shape.rank - weights.shape.rank))]
    return values * weights
