"""Unpacking gzip as a stream, which ends where it takes more than real files do."""

import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from dtransformer.errors import InputError, one_line
from dtransformer.inputs.files import MEBIBYTE
from dtransformer.inputs.machine import free_memory
from dtransformer.inputs.paths import FilePath

# Text is packed to a third or a fifth, the same line again and again to a hundredth; what is made
# to fill the memory to a thousandth.
MAX_RATIO = 200
FREE_OF_RATIO = 16 * MEBIBYTE
_SHARE_OF_MEMORY = 8


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
