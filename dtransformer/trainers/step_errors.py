"""Conversion of TensorFlow's errors during a step to one-line errors."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from dtransformer.errors import InputError, is_of_another_rank

_NOT_COUNTED = (
    " To ignore labels of -100, use CrossEntropyLoss(ignore_id=-100), or ignore_class=-100."
)
# Matches the message of `loss_terms.check_range`, in graphs and in eager mode.
_CHECKED = re.compile(r"dtransformer: ([^'\]]*)['\]]\s+\[?(-?\d+)\]?\s+\[?(-?\d+)")
_LOOKED_UP = re.compile(r"= (-?\d+) is not in \[0, (\d+)\)")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_REFUSED = re.compile(r"InputError: ([^\n]*)")


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
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
        if refused := _REFUSED.search(error.message):
            raise InputError(refused[1]) from None
        line = _line(error.message)
        if line is None and isinstance(error, tf.errors.CancelledError):
            line = "Another device of the mesh failed. Check that all ids are valid table indices."
        if line is None and is_of_another_rank(error.message):
            raise RuntimeError(
                "Stopped because another rank has failed or exited. See its output."
            ) from None
        if line is None:
            raise
        raise ValueError(line + _NOT_COUNTED * (" -100" in line)) from None


def _line(message):
    if found := _CHECKED.search(message):
        line, lowest, highest = found.groups()
        return f"{line} {lowest} to {highest}."
    if found := _LOOKED_UP.search(message):
        number, size = map(int, found.groups())
        return f"An id or label of the batch is {number}, but must be 0 to {size - 1}."
    if found := _LABEL.search(message):
        return f"A label of the batch is {found[1]}, but the outputs have {found[2]} classes."
    return None
