"""Unpacking gzip and tar as streams, which ends where it takes more than real files do."""

import gzip
import pathlib
import tarfile
import zlib
from collections.abc import Collection, Iterator
from typing import BinaryIO

from dtransformer.errors import InputError, one_line
from dtransformer.inputs.files import CHUNK, MEBIBYTE, opened
from dtransformer.inputs.machine import free_memory
from dtransformer.inputs.paths import FilePath

# Text is packed to a third or a fifth, the same line again and again to a hundredth; what is made
# to fill the memory to a thousandth.
MAX_RATIO = 200
FREE_OF_RATIO = 16 * MEBIBYTE
_MAX_TAR = 1024 * MEBIBYTE
_MAX_EMPTY = 10
_SHARE_OF_MEMORY = 8
_MAGIC = b"\x1f\x8b"


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
    counted, num_out = _Counted(file), 0
    try:
        with gzip.GzipFile(fileobj=counted, mode="rb") as stream:
            while chunk := stream.read1(MEBIBYTE):
                num_out += len(chunk)
                if num_out > min(limit, max(FREE_OF_RATIO, MAX_RATIO * counted.number)):
                    raise InputError(
                        f"{name}: {counted.number:,} bytes of gzip give more than "
                        f"{num_out - len(chunk):,}, which no text does, or the memory does not hold: "
                        "unpack it by other means"
                    )
                yield chunk
        if not counted.number:
            raise EOFError("it is empty")
    except (zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise InputError(
            f"{name} is not a complete gzip file ({one_line(error, 80)}): copy or pack it again"
        ) from None


class _Counted:
    """A file that is read, and the number of the bytes that were."""

    def __init__(self, file):
        self._file, self.number = file, 0

    def read(self, size):
        data = self._file.read(size)
        self.number += len(data)
        return data


def tar_members(
    archive: FilePath, wanted: Collection[str], max_bytes: int, advice: str
) -> dict[str, bytes]:
    """Return the wanted members of a tar archive, which may be packed with gzip.

    Members are found by the last part of their names and read into memory: what an
    archive says of paths, links and permissions is not followed.

    Args:
        archive: its path.
        wanted: names of regular files; of several with one name the first is taken.
        max_bytes: the most bytes that a member may have.
        advice: the end of messages, what to do instead.

    Returns:
        A dict of names and contents.

    Raises:
        InputError: the archive is damaged or incomplete, lacks a file, or holds one too large.
    """
    found = {}
    try:
        with opened(archive) as file:
            stream = _Stream(file, archive)
            # "r|" reads forwards only, so that no size, negative ones included, leads back.
            with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as tar:
                for member in tar:
                    name = pathlib.PurePosixPath(member.name).name
                    if member.size < 0:
                        raise tarfile.HeaderError(f"a size of {member.size}")
                    if name not in wanted or name in found or not member.isreg():
                        continue
                    if member.size > max_bytes or member.issparse():
                        raise InputError(
                            f"{archive}: {name} has {member.size} bytes, expected at most "
                            f"{max_bytes}, and no holes: {advice}"
                        )
                    found[name] = tar.extractfile(member).read()
            stream.finish()  # gzip's checksum stands at the very end
    except InputError:
        raise
    except (
        tarfile.TarError,
        ValueError,
        EOFError,
        OSError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = one_line(error, 100).rstrip(":")
        raise InputError(f"{archive} is not a complete tar archive ({reason}): {advice}") from None
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise InputError(f"{archive} holds no regular file named {', '.join(missing)}: {advice}")
    return found


class _Stream:
    """A file, unpacked where it is gzip, that can only be read forwards, to a limit.

    Args:
        file: the open file.
        name: its name, for messages.
    """

    def __init__(self, file, name):
        self._name = name
        self._packed = file.peek(len(_MAGIC))[: len(_MAGIC)] == _MAGIC
        self._chunks = unpacked(file, name) if self._packed else iter(lambda: file.read(CHUNK), b"")
        self._held, self._num_read, self._num_empty = b"", 0, 0

    def read(self, size):
        """Return the next bytes, `size` of them, or fewer at the end."""
        while len(self._held) < size and (chunk := next(self._chunks, b"")):
            self._held += chunk
        data, self._held = self._held[:size], self._held[size:]
        self._num_read += len(data)
        self._num_empty += not data  # tarfile goes on to read where a size leads beyond the end
        if self._num_read > _MAX_TAR or self._num_empty > _MAX_EMPTY:
            raise EOFError(f"more than {_MAX_TAR:,} bytes, or a file that ends early")
        return data

    def finish(self):
        """Read what is packed to its end, which checks the rest."""
        while self._packed and self.read(MEBIBYTE):
            pass
