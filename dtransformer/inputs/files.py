"""Paths from outside; files read with a limit, and written whole; the memory that there is for them."""

import contextlib
import gzip
import os
import pathlib
import resource
import stat
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from dtransformer.errors import InputError, one_line, shown
from dtransformer.files import replacing

_MEMORY = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
_UNKNOWN = 2**40


def free_memory() -> int:
    """Return the bytes of memory that this process may still take.

    They are the least of what is free on the machine, what the container's limit leaves, and the
    process' own limit.
    """
    return min(_free_on_machine(), _free_in_container(), _own_limit())


def _free_on_machine():
    try:
        lines = _MEMORY.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):  # another system
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNKNOWN


def _free_in_container():
    try:
        limit, used = ((_GROUP / name).read_text() for name in ("memory.max", "memory.current"))
        lines = (_GROUP / "memory.stat").read_text().splitlines()
        # Pages of files, which make room for others.
        of_files = "active_file ", "inactive_file "
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(of_files))
        return max(int(limit) - int(used) + cached, 0)
    except (OSError, ValueError):  # none, or "max"
        return _UNKNOWN


def _own_limit():
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _UNKNOWN if limit == resource.RLIM_INFINITY else limit


FilePath = str | os.PathLike
MAX_PATH, MAX_NAME = 4095, 255  # bytes that Linux takes for a path, and for each part of it


def check_path(path: FilePath, what: str = "path") -> pathlib.Path:
    """Return a path that the file system can be asked for.

    Args:
        path: the path.
        what: what it is for, for messages.

    Raises:
        InputError: it is empty, too long, or has a NUL.
    """
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError(f"{what} {shown(os.fspath(path))}: has half of a surrogate pair") from None
    longest = max(map(len, data.split(b"/")))
    if not data or b"\0" in data:
        raise InputError(f"{what} {shown(os.fspath(path))}: expected a path, without NUL")
    if len(data) > MAX_PATH or longest > MAX_NAME:
        raise InputError(
            f"{what} {shown(os.fspath(path))} is too long: {len(data)} bytes, its longest name "
            f"{longest}; a path may have {MAX_PATH}, a name {MAX_NAME}: give a shorter one"
        )
    return pathlib.Path(path)


def check_name(name: str) -> str:
    """Return a name of a file inside of a folder, such as `"tokenizer/vocab.txt"`.

    Raises:
        ValueError: it is absolute, leads out of the folder, or is no name.

    Example:

    >>> check_name("../secret")
    Traceback (most recent call last):
    ValueError: expected a path inside of the folder, such as 'tokenizer/vocab.txt'
    """
    parts = name.split("/")
    is_long = len(os.fsencode(name)) > MAX_NAME
    if is_long or not name.isprintable() or {"", ".", ".."}.intersection(parts) or "\\" in name:
        raise ValueError("expected a path inside of the folder, such as 'tokenizer/vocab.txt'")
    return name


def inside(folder: FilePath, name: str) -> pathlib.Path:
    """Return the path of a file in a folder.

    Args:
        folder: the folder.
        name: the file's name in it, which may have several parts.

    Raises:
        InputError: the name, or a link that lies there, leads out of the folder.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise InputError(f"{folder}: {shown(name)}: {error}") from None
    path = pathlib.Path(folder) / name
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
        raise InputError(f"{path} is a link, or leads through one: put the file itself there")
    return path


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


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write text as UTF-8, line ends as they are, so that the file is complete or not there.

    Args:
        path: the file to write. Folders above it are made where they are missing.
        text: what to write.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(check_path(path), parents=True) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="")
