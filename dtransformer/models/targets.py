"""The place of what a training leaves, checked before it begins."""

import os
import pathlib

from dtransformer.errors import InputError
from dtransformer.parallel.collectives.objects import from_chief

_SAVED = ("adapter_*", "config.json", "model*.safetensors*")


def check_target(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Check, before training, that what is trained can be saved where it is to be.

    All ranks have to call. Savers lose nothing where a name is taken: they write beside it, and
    warn. This is an error instead, while nothing is trained yet.

    Args:
        path: the folder of `save_lora` or `save_pretrained`, or the file of `Trainer.save_weights`.
        overwrite: whether what is there is going to be replaced.

    Raises:
        InputError: something is there already, or nothing can be written there.

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
                f"{path}: is there already: give another name, or overwrite=True (--overwrite)"
            )
        there = next(x for x in (path, *path.absolute().parents) if x.exists())
        if not os.access(there, os.W_OK):
            raise InputError(f"{path}: cannot be written: give a place that you may write to")

    from_chief(check, "models/target")
