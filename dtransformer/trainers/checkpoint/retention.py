"""Retention of checkpoints of a folder: the newest ones, and the best."""

import os
import pathlib
from collections.abc import Sequence

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint


def remove_old(
    folder: str | os.PathLike, keep: int, monitor: str | None = None, sign: int = 1
) -> None:
    """Remove all checkpoints of a folder but the newest ones and the best.

    Args:
        folder: a folder of checkpoints.
        keep: number of the newest ones that stay, at least 1.
        monitor, sign: as of `best_of`.

    Raises:
        OSError: one cannot be removed; the others are.
    """
    saved = [path for _, path in folders.saved_steps(folder)]
    best = best_of(saved, monitor, sign)
    errors = []
    for path in saved[:-keep]:
        try:
            if path != best:
                folders.remove(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def best_of(
    paths: Sequence[pathlib.Path], monitor: str | None, sign: int = 1
) -> pathlib.Path | None:
    """Return the checkpoint with the best value of a log; None where none has it.

    Args:
        paths: the checkpoints' folders, the oldest first; of equal values the first is best.
        monitor: name of the log, or None.
        sign: 1 where small values are good, -1 where large ones are.
    """
    values = {}
    for path in paths if monitor is not None else ():
        try:
            value = Checkpoint(path).manifest["metrics"].get(monitor)
        except InputError:  # damaged
            continue
        if value is not None:
            values[path] = sign * value
    return min(values, key=values.get) if values else None
