"""Files that are complete or as they were: written beside, then renamed."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from dtransformer.errors import InputError

_PARTIAL = ".partial."


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, num_bytes: int = 0, parents: bool = False
) -> Iterator[pathlib.Path]:
    """Give a path beside a file's, with the same ending; what is written there becomes the file.

    An error, or a kill, leaves the file as it was.

    Args:
        path: the file to write. Of a link, what it points to is written.
        num_bytes: space that has to be there before writing begins: libraries such as HDF5 end
            the process when the disk is full.
        parents: whether folders above it are made where they are missing.

    Raises:
        InputError: the file cannot be written.

    Example:

    >>> with replacing("greeting.txt") as fresh:
    ...     _ = fresh.write_text("Good morning.")
    """
    target = pathlib.Path(os.path.realpath(path))
    fresh = partial_path(target)
    if os.path.lexists(target) and not target.is_file():
        raise InputError(f"{path}: cannot be written, as it is no ordinary file: give another path")
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        _reserve(fresh, num_bytes)
        yield fresh
        _sync(fresh)
        os.replace(fresh, target)
        _sync(target.parent)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(
            f"{path}: cannot be written ({reason}): make room, or give a place that you may write to"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """Return where a file is written before it becomes the one at a path, with the same ending."""
    return path.with_name(f"{_PARTIAL}{os.getpid()}.{path.name}")


def is_partial(name: str) -> bool:
    """Return whether a file's name is that of a `partial_path`."""
    return name.startswith(_PARTIAL)


def beside(path: str | os.PathLike, ending: str) -> pathlib.Path:
    """Return the path of a folder next to one, whose name has an ending more.

    Example:

    >>> beside("runs/small/", ".replaced").as_posix()
    'runs/small.replaced'
    """
    path = pathlib.Path(path)
    if path.name in ("", ".."):  # such as "."
        path = pathlib.Path(os.path.abspath(path))
    return path.parent / (path.name + ending)


def _reserve(path, num_bytes):
    """Raise an OSError where a disk has no room for a file of a size."""
    with open(path, "wb") as file:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(0)


def _sync(path):
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
