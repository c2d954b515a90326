"""Conversion of TensorFlow's errors during a step to one-line errors."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.errors import InputError, is_from_other_rank

_IGNORE_HINT = (
    " To ignore labels of -100, use CrossEntropyLoss(ignore_id=-100), or ignore_class=-100."
)
# Matches the message of `_check_range` in `objective.py`, in graphs and in eager mode.
_RANGE_ERROR = re.compile(r"dtransformer: ([^'\]]*)['\]]\s+\[?(-?\d+)\]?\s+\[?(-?\d+)")
_LOOKUP_ERROR = re.compile(r"= (-?\d+) is not in \[0, (\d+)\)")
_LABEL_ERROR = re.compile(
    r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)
_INPUT_ERROR = re.compile(r"InputError: ([^\n]*)")


@contextlib.contextmanager
def convert_step_errors() -> Iterator[None]:
    """Inside the `with` block, convert known errors of TensorFlow operations to one-line errors.

    After an error of an operation on a mesh, this mesh is unusable for the rest of the process.

    Raises:
        InputError: If the data reader rejects the data.
        ValueError: If labels or ids are out of range.
        RuntimeError: If another rank has failed, so that collectives cannot continue.
    """
    try:
        yield
    except tf.errors.OpError as error:
        # The data reader raised it.
        if match := _INPUT_ERROR.search(error.message):
            raise InputError(match[1]) from None
        line = _format_error(error.message)
        if line is None and isinstance(error, tf.errors.CancelledError):
            line = "Another device of the mesh failed. Check that all ids are valid table indices."
        if line is None and is_from_other_rank(error.message):
            raise RuntimeError(
                "Stopped because another rank has failed or exited. See its output."
            ) from None
        if line is None:
            raise
        raise ValueError(line + (_IGNORE_HINT if " -100" in line else "")) from None


def _format_error(message):
    if match := _RANGE_ERROR.search(message):
        line, lowest, highest = match.groups()
        return f"{line} {lowest} to {highest}."
    if match := _LOOKUP_ERROR.search(message):
        value, size = map(int, match.groups())
        return f"An id or label of the batch is {value}, but must be 0 to {size - 1}."
    if match := _LABEL_ERROR.search(message):
        return f"A label of the batch is {match[1]}, but the outputs have {match[2]} classes."
    return None
