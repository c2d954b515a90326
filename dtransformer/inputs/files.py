"""Opening and reading files, with a limit."""

import contextlib
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from dtransformer.errors import InputError, one_line
from dtransformer.inputs.machine import free_memory
from dtransformer.inputs.paths import FilePath, check_path

MEBIBYTE = 2**20
_SHARE_OF_MEMORY = 8  # lines of text take several times the bytes that they are read from
# Text is packed to a third or a fifth, the same line again and again to a hundredth; what is made
# to fill the memory to a thousandth.
MAX_RATIO = 200
FREE_OF_RATIO = 16 * MEBIBYTE


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


def unpacked(file: BinaryIO, name: FilePath, limit: int | None = None) -> Iterator[bytes]:
    """Return the bytes of a gzip file, at most a mebibyte at a time.

    Args:
        file: the open file.
        name: its name, for messages.
        limit: the most bytes that come out; None for what the machine's memory holds.

    Raises:
        InputError: it is damaged or incomplete, or grows beyond all measure.
    """
    limit = free_memory() // _SHARE_OF_MEMORY if limit is None else limit
    size, num_out = os.fstat(file.fileno()).st_size, 0  # of a pipe, 0
    try:
        if not file.peek(1):
            raise EOFError("it is empty")
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            while chunk := stream.read1(MEBIBYTE):
                num_out += len(chunk)
                if num_out > min(limit, max(FREE_OF_RATIO, MAX_RATIO * size)):
                    raise InputError(
                        f"{name}: {size:,} bytes of gzip give more than "
                        f"{num_out - len(chunk):,}, which no text does, or the memory does not hold: "
                        "unpack it by other means"
                    )
                yield chunk
    except (zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise InputError(
            f"{name} is not a complete gzip file ({one_line(error, 80)}): copy or pack it again"
        ) from None
