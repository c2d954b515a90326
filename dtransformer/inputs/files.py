"""Checking paths, reading files with size limits, and atomic writing of text."""

import contextlib
import gzip
import os
import pathlib
import resource
import stat
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from dtransformer.errors import InputError, short_repr, to_one_line
from dtransformer.files import atomic_write

_MEMORY = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
_UNKNOWN = 2**40


def free_memory() -> int:
    """Return the number of bytes of memory that this process can still allocate.

    It is the minimum of the machine's free memory, the rest of the container's limit, and the
    process' address space limit.
    """
    return min(_free_on_machine(), _free_in_container(), _address_space_limit())


def _free_on_machine():
    try:
        lines = _MEMORY.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):  # Not Linux.
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _UNKNOWN


def _free_in_container():
    try:
        limit, used = ((_GROUP / name).read_text() for name in ("memory.max", "memory.current"))
        lines = (_GROUP / "memory.stat").read_text().splitlines()
        # The kernel frees cached pages of files when memory is needed.
        cached_fields = "active_file ", "inactive_file "
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(cached_fields))
        return max(int(limit) - int(used) + cached, 0)
    except (OSError, ValueError):  # There is no container, or its limit is "max".
        return _UNKNOWN


def _address_space_limit():
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _UNKNOWN if limit == resource.RLIM_INFINITY else limit


FilePath = str | os.PathLike
# Linux's limits in bytes for a path and for each part of it.
MAX_PATH = 4095
MAX_NAME = 255


def check_path(path: FilePath, what: str = "path") -> pathlib.Path:
    """Return a path as `pathlib.Path`, and check that the file system accepts it.

    Args:
        path: The path.
        what: Description of the path, for error messages. Defaults to "path".

    Raises:
        InputError: If the path is empty, too long, or contains NUL or half of a surrogate pair.
    """
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError(
            f"{what} {short_repr(os.fspath(path))} has half of a surrogate pair. Rename it in UTF-8."
        ) from None
    longest = max(map(len, data.split(b"/")))
    if not data or b"\0" in data:
        raise InputError(
            f"{what} {short_repr(os.fspath(path))} must be a nonempty path without NUL."
        )
    if len(data) > MAX_PATH or longest > MAX_NAME:
        raise InputError(
            f"{what} {short_repr(os.fspath(path))} is too long: {len(data)} bytes (at most "
            f"{MAX_PATH}), its longest name {longest} (at most {MAX_NAME}). Use a shorter path."
        )
    return pathlib.Path(path)


def check_name(name: str) -> str:
    """Return a name such as `"tokenizer/vocab.txt"` after checking that it stays in its folder.

    Raises:
        ValueError: If the name is empty, absolute, too long, unprintable or leaves the folder.

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
        folder: Path of the folder.
        name: Name of the file, which may have several parts.

    Raises:
        InputError: If the name leaves the folder, or a part of the path is a link.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise InputError(f"{folder}: {short_repr(name)} is invalid: {error}.") from None
    path = pathlib.Path(folder) / name
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
        raise InputError(f"{path} is a link or leads through one. Put the file itself there.")
    return path


MEBIBYTE = 2**20
_MEMORY_DIVISOR = 8  # Lines of text need several times the memory of their bytes.
# gzip compresses text 3 to 5 times, a single repeated line 100 times, and decompression bombs
# 1,000 times.
MAX_RATIO = 200
FREE_OF_RATIO = 16 * MEBIBYTE


@contextlib.contextmanager
def opened(path: FilePath) -> Iterator[BinaryIO]:
    """Open a file or a pipe for reading, as a context manager.

    Devices are refused because they may be endless. A pipe without a writer is empty.

    Raises:
        InputError: If the file cannot be opened, or reading fails inside the `with` block.
    """
    check_path(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise InputError(f"{path} is neither a file nor a pipe. Give a file.")
            os.set_blocking(descriptor, True)
            yield file
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist (working directory {os.getcwd()}). Check the path or create the "
            "file first."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder. Give a file.") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}. Check the file and its permissions."
        ) from None


def read_bytes(path: FilePath, limit: int | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        path: Path of the file.
        limit: Integer. Maximum number of bytes. Defaults to an eighth of the free memory.

    Raises:
        InputError: If the file cannot be read or is too large.
    """
    with opened(path) as file:
        return read_limited(file, path, limit)


def read_limited(file: BinaryIO, name: FilePath, limit: int | None = None) -> bytes:
    """Return the remaining bytes of an open file; see `read_bytes`.

    Args:
        file: Binary file.
        name: Name of the file, for error messages.
        limit: See `read_bytes`.

    Raises:
        InputError: If there are more bytes than `limit`.
    """
    if limit is None:
        limit = free_memory() // _MEMORY_DIVISOR
    data = bytearray()
    while chunk := file.read(min(MEBIBYTE, limit + 1 - len(data))):
        data += chunk
        if len(data) > limit:
            raise InputError(
                f"{name} has more than {limit:,} bytes, the limit for this file. Use a smaller file."
            )
    return bytes(data)


def unpacked(file: BinaryIO, name: FilePath, limit: int | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a gzip file, at most one mebibyte at a time.

    Args:
        file: Binary file.
        name: Name of the file, for error messages.
        limit: Integer. Maximum number of decompressed bytes. Defaults to an eighth of the free
            memory.

    Raises:
        InputError: If the file is damaged or incomplete, or decompresses to more than `limit`, or
            to more than 16 MiB and 200 times its size.
    """
    limit = free_memory() // _MEMORY_DIVISOR if limit is None else limit
    size = os.fstat(file.fileno()).st_size  # The size of a pipe is 0.
    num_unpacked = 0
    try:
        if not file.peek(1):
            raise EOFError("The file is empty.")
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            while chunk := stream.read1(MEBIBYTE):
                num_unpacked += len(chunk)
                if num_unpacked > min(limit, max(FREE_OF_RATIO, MAX_RATIO * size)):
                    raise InputError(
                        f"{name}: {size:,} bytes of gzip decompress to more than "
                        f"{num_unpacked - len(chunk):,} bytes, more than text or the free "
                        "memory allows. Decompress the file with another tool."
                    )
                yield chunk
    except (zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise InputError(
            f"{name} is not a complete gzip file ({to_one_line(error, 80)}). Copy or compress it again."
        ) from None


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write text as UTF-8 without changing line breaks. A failure leaves the old file in place.

    Args:
        path: Path of the file. Missing parent folders are created.
        text: The text.

    Raises:
        InputError: If the file cannot be written.
    """
    with atomic_write(check_path(path), parents=True) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="")
