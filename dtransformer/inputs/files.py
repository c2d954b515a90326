"""Opening and reading files, with a limit."""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from dtransformer.errors import InputError
from dtransformer.inputs.machine import free_memory
from dtransformer.inputs.paths import FilePath, check_path

MEBIBYTE = 2**20
CHUNK = 2**16
_SHARE_OF_MEMORY = 8  # lines of text take several times the bytes that they are read from


@contextlib.contextmanager
def opened(path: FilePath) -> Iterator[BinaryIO]:
    """Open a file, or a pipe, for reading.

    A device, which may have no end, is refused; a pipe that nobody writes to is empty.

    Raises:
        InputError: says why it cannot be read, also while it is.
    """
    check_path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise InputError(f"{path} is a device, or the like: give a file")
            os.set_blocking(descriptor, True)
            yield file
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist (looked from {os.getcwd()}): check the path, or write the "
            "file first"
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give a file in it") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; check the file and its permissions"
        ) from None


def read_bytes(path: FilePath, limit: int | None = None) -> bytes:
    """Return a file's bytes.

    Args:
        path: the file.
        limit: the most bytes that it may have; None for what the machine's memory holds.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    with opened(path) as file:
        return read_limited(file, path, limit)


def read_limited(file: BinaryIO, name: FilePath, limit: int | None = None) -> bytes:
    """Return what is left of an open file; as `read_bytes`."""
    if limit is None:
        limit = free_memory() // _SHARE_OF_MEMORY
    data = bytearray()
    while chunk := file.read(min(MEBIBYTE, limit + 1 - len(data))):
        data += chunk
        if len(data) > limit:
            raise InputError(
                f"{name} has more than the {limit:,} bytes that are read here: give a smaller file"
            )
    return bytes(data)
