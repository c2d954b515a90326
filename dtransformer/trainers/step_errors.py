"""Errors of a step's operations, in one line."""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.errors import InputError, is_of_another_rank

MAX_SKIPPED = 50  # steps in a row
SKIPPED_IN_A_ROW = "skipped_in_a_row"  # in the logs of a step
_NOT_COUNTED = (
    ": labels of -100 are left out by CrossEntropyLoss(ignore_id=-100), or ignore_class=-100"
)
# What `loss_terms.check_range` says, as an operation of a graph tells it, or one that is run by itself.
_CHECKED = re.compile(r"dtransformer: ([^'\]]*)['\]]\s+\[?(-?\d+)\]?\s+\[?(-?\d+)")
_LOOKED_UP = re.compile(r"= (-?\d+) is not in \[0, (\d+)\)")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_REFUSED = re.compile(r"InputError: ([^\n]*)")


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Inside the `with` block errors of TensorFlow's operations that are known are ValueErrors.

    After an error of an operation on a mesh TensorFlow computes nothing more on it in this process.

    Raises:
        InputError: what reads the data refuses them.
        ValueError: labels or ids are out of range.
        RuntimeError: another rank has failed, so that what ranks do together cannot go on.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if refused := _REFUSED.search(error.message):  # by what reads the data
            raise InputError(refused[1]) from None
        line = _line(error.message)
        if line is None and isinstance(error, tf.errors.CancelledError):
            line = "another device of the mesh failed: an id that is in no table, most often"
        if line is None and is_of_another_rank(error.message):
            raise RuntimeError("another rank has failed, or left: what it says tells why") from None
        if line is None:
            raise
        raise ValueError(line + _NOT_COUNTED * (" -100" in line)) from None


def _line(message):
    if found := _CHECKED.search(message):
        line, lowest, highest = found.groups()
        return f"{line} {lowest} and {highest}"
    if found := _LOOKED_UP.search(message):
        number, size = map(int, found.groups())
        return f"an id or label of the batch is {number}, expected 0 to {size - 1}"
    if found := _LABEL.search(message):
        return f"a label of the batch is {found[1]}, and the outputs have {found[2]} classes"
    return None


class LossCheck:
    """Check of the losses: one warning if a loss is inf or nan, an error if float16 skips all steps.

    Call arguments:
        logs: Dict of numbers, the logs of a training step. `SKIPPED_IN_A_ROW` is removed.
        step: Number of the step.
        find_layer: Function that returns the path of the first layer with inf or nan outputs, or
            `None`. `None` if layers cannot be computed one by one.

    Raises:
        ValueError: If `MAX_SKIPPED` steps in a row were skipped.
    """

    _warned = False

    def __call__(self, logs, step, find_layer):
        skipped, loss = logs.pop(SKIPPED_IN_A_ROW, 0), logs["step_loss"]
        if skipped >= MAX_SKIPPED:
            layer = find_layer and find_layer()
            cause = f"the first layer with inf or nan outputs is {layer!r}. "
            raise ValueError(
                f"the last {skipped:g} steps were skipped, because gradients overflowed in float16"
                f"{': ' + cause if layer else '. '}Nothing is trained: use the dtype policy "
                "'mixed_bfloat16', which has the range of float32"
            )
        if not self._warned and not math.isfinite(loss):
            self._warned = True
            cause = "so the weights will be nan: look for inf and nan in the data, or lower the "
            fix = "learning rate"
            if "loss_scale" in logs:
                cause, fix = "so the step is skipped: ", "use 'mixed_bfloat16' if this continues"
            warnings.warn(f"the loss of step {step} is {loss}, {cause}{fix}", stacklevel=2)
