"""Checks of training steps on the host, and the search for the layer that overflows."""

import contextlib
import functools
import math
import warnings

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.trainers.batch_fingerprints import compare_batches

MAX_SKIPPED = 50  # steps in a row
SKIPPED_IN_A_ROW = "skipped_in_a_row"  # in the logs of a step


class StepCheck:
    """Check of the ranks' batches and of the losses, whenever the logs of steps are read.

    Args:
        model: The trainer, or `None` if layers cannot be called one by one.

    Call arguments:
        logs: Dict of numbers, the logs of the last step. `SKIPPED_IN_A_ROW` is removed.
        tables: List of the fingerprints of all steps since the last call.
        step: Number of the last step.
        batch: Nested tensors, the batch of the last step.

    Raises:
        ValueError: If ranks have wrong batches, see `compare_batches`, or if float16 has skipped
            `MAX_SKIPPED` steps in a row.
    """

    def __init__(self, model=None):
        self._model, self._warned, self._totals = model, False, 0

    def __call__(self, logs, tables, step, batch):
        self._totals = compare_batches(tables, step - len(tables), self._totals)
        loss = logs.get("step_loss", 0.0)
        skipped = logs.pop(SKIPPED_IN_A_ROW, 0)
        if skipped >= MAX_SKIPPED:
            layer = self._model and first_overflow(self._model, batch)
            cause = f": the first layer with inf or nan outputs is {layer!r}" if layer else ""
            raise ValueError(
                f"the last {skipped:g} steps were skipped, because gradients overflowed in float16"
                f"{cause}. Nothing is trained: use the dtype policy 'mixed_bfloat16', which has the "
                "range of float32"
            )
        if not self._warned and not math.isfinite(loss):
            self._warned = True
            warnings.warn(
                f"the loss of step {step} is {loss}. Look for inf and nan in the data, lower the "
                "learning rate, or use 'mixed_bfloat16' if the network computes in float16",
                stacklevel=2,
            )


def first_overflow(model: keras.Model, batch: tuple) -> str | None:
    """Call a model in Python; return the path of the first layer with inf or nan outputs.

    Args:
        model: A `keras.Model` that is built.
        batch: Inputs, or inputs and labels, nested tensors [b, ...].

    Returns:
        The path, or `None` if all outputs are finite.
    """
    paths = []

    def checked(layer, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        for x in filter(tf.is_tensor, tf.nest.flatten(outputs)):
            if x.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(x)):
                paths.append(layer.path)
        return outputs

    with contextlib.ExitStack() as stack:
        for layer in _compat.flat_layers(model):
            call = functools.partial(checked, layer, layer.call)
            stack.enter_context(_compat.meanwhile(layer, call=call))
        model.call(keras.utils.unpack_x_y_sample_weight(batch)[0])
    return next(iter(paths), None)
