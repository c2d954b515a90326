"""Private names of Keras: losses, masks and errors of a layer's call."""

import functools
import re
import traceback
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import data_adapter_utils

_KERAS_PREFIX = re.compile(r"^.*Error encountered:\n\n", re.DOTALL)


def get_keras_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return the mask that a Keras layer attached to its result, or `None`.

    Unnecessary if Keras had a public function to read the mask of `keras.layers.Masking`'s
    protocol.
    """
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Return the tensor with a mask for the next layer or loss. For the reason, see `get_keras_mask`."""
    tensor._keras_mask = mask
    return tensor


def get_keras_masks(tensors) -> dict[int, tf.Tensor]:
    """Return the masks of nested tensors as a dict by flat index, without tensors that have none.

    Masks are attributes and get lost when tensors enter or leave a function or are sent.
    For the reason, see `get_keras_mask`.
    """
    masks = {i: get_keras_mask(x) for i, x in enumerate(tf.nest.flatten(tensors))}
    return {i: mask for i, mask in masks.items() if mask is not None}


def with_masks(tensors, masks: dict[int, tf.Tensor]):
    """Return nested tensors with the masks from `get_keras_masks`.

    For the reason, see `get_keras_mask`.
    """
    flat = tf.nest.flatten(tensors)
    for i, mask in masks.items():
        flat[i] = with_mask(tf.identity(flat[i]), mask)
    return tf.nest.pack_sequence_as(tensors, flat)


def may_add_losses(layer: keras.layers.Layer) -> bool:
    """Return whether a layer added a loss when it was traced in a `keras.StatelessScope`.

    Unnecessary if the scope recorded the layer of each loss.
    """
    return bool(layer._loss_ids)


class CompileLoss(compile_utils.CompileLoss):
    """Keras' assignment of the losses in `compile` to the network's outputs.

    Unnecessary if Keras exposed the loss of each output.

    Args:
        loss, loss_weights: Arguments of `keras.Model.compile`.
        output_names: List of the outputs' names, or `None`.
        term: Function `(loss, name)` that returns the loss function to compute instead.
    """

    def __init__(self, loss, loss_weights, output_names, term):
        super().__init__(loss, loss_weights, output_names=output_names)
        self._term = term

    def __setattr__(self, name, value):
        super().__setattr__(
            name, _ListOfLengthOne() if name == "_flat_losses" and value == [] else value
        )

    def build(self, y_true, y_pred):
        super().build(y_true, y_pred)
        self._flat_losses = [
            loss._replace(loss=self._term(loss.loss, loss.name)) for loss in self._flat_losses
        ]

    @property
    def metrics(self):
        return [None] * len(self._flat_losses or [None])


class _ListOfLengthOne(list):
    """List that reports a length of one, because Keras would create metrics for several losses."""

    def __len__(self):
        return 1


def class_weight_to_sample_weight(labels, class_weight: dict, sample_weight=None):
    """Return the sample weights that `train_on_batch(class_weight=...)` uses.

    Unnecessary if Keras exported the conversion.

    Raises:
        ValueError: If there are also sample weights.
    """
    if sample_weight is not None:
        raise ValueError(
            "Received both `class_weight` and `sample_weight`. Multiply them, and pass "
            "`sample_weight` only."
        )
    return data_adapter_utils.class_weight_to_sample_weights(labels, class_weight)


def keep_error_messages(call: Callable) -> Callable:
    """Decorate a layer's `call` or `__call__` so that Keras does not extend this library's errors.

    Keras appends a line per argument to errors in a call, unless the error is marked as extended.
    For symbolic calls it also prepends a sentence. Errors from other modules are raised unchanged.
    """

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (TypeError, ValueError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("dtransformer."):
                raise
            text = _KERAS_PREFIX.sub("", str(error)).partition("\x1b[0m")[0]
            new_error = error if text == str(error) else type(error)(text)
            new_error._keras_call_info_injected = True
            raise new_error.with_traceback(error.__traceback__) from None

    return wrapped
