"""Check of the losses, and search for the layer that overflows."""

import contextlib
import functools
import math
import warnings

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.trainers.engines.base import ForwardStep

MAX_SKIPPED = 50  # steps in a row
SKIPPED_IN_A_ROW = "skipped_in_a_row"  # in the logs of a step


class LossCheck:
    """Check of the losses: one warning if a loss is inf or nan, an error if float16 skips all steps.

    Args:
        network: A `keras.Model`.
        in_parts: Whether layers cannot be called one by one, as on a mesh and in a pipeline.

    Call arguments:
        logs: Dict of numbers, the logs of a training step. `SKIPPED_IN_A_ROW` is removed.
        step: Number of the step.
        batch: Nested tensors, the batch of the step.

    Raises:
        ValueError: If `MAX_SKIPPED` steps in a row were skipped.
    """

    def __init__(self, network, in_parts):
        self._network, self._in_parts, self._warned = network, in_parts, False

    def __call__(self, logs, step, batch):
        skipped, loss = logs.pop(SKIPPED_IN_A_ROW, 0), logs["step_loss"]
        if skipped >= MAX_SKIPPED:
            layer = None if self._in_parts else first_overflow(self._network, batch)
            cause = f": the first layer with inf or nan outputs is {layer!r}" if layer else ""
            raise ValueError(
                f"the last {skipped:g} steps were skipped, because gradients overflowed in float16"
                f"{cause}. Nothing is trained: use the dtype policy 'mixed_bfloat16', which has the "
                "range of float32"
            )
        if not self._warned and not math.isfinite(loss):
            self._warned = True
            advice = "The weights will be nan: look for inf and nan in the data, or lower the rate"
            if "loss_scale" in logs:
                advice = "The step is skipped: if this continues, use 'mixed_bfloat16'"
            warnings.warn(f"the loss of step {step} is {loss}. {advice}", stacklevel=2)


def first_overflow(network: keras.Model, batch: tuple) -> str | None:
    """Call a network in Python; return the path of the first layer with inf or nan outputs.

    Args:
        network: A `keras.Model` that is built.
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
        for layer in _compat.flat_layers(network):
            call = functools.partial(checked, layer, layer.call)
            stack.enter_context(_compat.meanwhile(layer, call=call))
        ForwardStep(network).outputs(keras.utils.unpack_x_y_sample_weight(batch)[0])
    return next(iter(paths), None)
