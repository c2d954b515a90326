"""Checks of the losses and class weights that users pass."""

import keras

from dtransformer import _compat

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


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


def check_class_weight(objective, labels) -> None:
    """Check that class weights are not combined with token labels.

    Keras would weight each row by the class of its largest label.

    Args:
        objective: The `Objective`.
        labels: Labels, or their spec.

    Raises:
        ValueError: If the labels are class ids [b, s] or [b, s, ...].
    """
    shape = getattr(labels, "shape", ())
    has_ids = objective.is_token_loss or "sparse_categorical_crossentropy" in str(objective.losses)
    if has_ids and len(shape) > 1 and shape[-1] != 1:
        raise ValueError(
            f"`class_weight` weights rows, but the labels of shape {tuple(shape)} are class "
            "ids of tokens. Pass `sample_weight` in the labels' shape instead, the weight of "
            "each label's class."
        )


def get_sample_weight(objective, labels, class_weight, sample_weight=None):
    """Return the sample weights of a batch, from class weights if there are any.

    Raises:
        ValueError: If class weights are combined with token labels.
    """
    if class_weight is None:
        return sample_weight
    check_class_weight(objective, labels)
    return _compat.class_weight_to_sample_weight(labels, class_weight, sample_weight)
