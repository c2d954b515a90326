"""Check the output path of a training run before training starts."""

import os
import pathlib

from dtransformer.errors import InputError
from dtransformer.parallel.collectives.objects import from_chief

_SAVED = ("adapter_*", "config.json", "model*.safetensors*")


def check_target(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Check that trained weights can be saved to a path, before training.

    Call it on all ranks. Savers never overwrite other files by default: they save next to
    them and warn. This function raises an error instead, before any compute is spent.

    Args:
        path: Folder for `save_lora` or `save_pretrained`, or file for
            `Trainer.save_weights`.
        overwrite: Boolean. Whether existing weights will be replaced.

    Raises:
        InputError: If `path` exists already, or is not writable. An existing folder counts
            only if it contains weights or a config.

    Example:

    >>> check_target("adapters/mine")
    """
    path = pathlib.Path(path)

    def check():
        is_taken = os.path.lexists(path)
        if path.is_dir():
            is_taken = any(True for pattern in _SAVED for _ in path.glob(pattern))
        if is_taken and not overwrite:
            raise InputError(
                f"{path} exists already. Choose another name, or set `overwrite=True` (`--overwrite`)."
            )
        there = next(x for x in (path, *path.absolute().parents) if x.exists())
        if not os.access(there, os.W_OK):
            raise InputError(
                f"{path} is not writable. Choose another folder, or change its permissions."
            )

    from_chief(check, "models/target")
