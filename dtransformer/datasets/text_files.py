"""Bytes to lines and text to files, for every reader and writer of this package."""

import os
from pathlib import Path

from dtransformer.errors import InputError

FilePath = str | os.PathLike
WHITE_SPACE = " \t\v\f\r\n"  # what separates words; a no-break space is text


def read_bytes(path: FilePath) -> bytes:
    """Return a file's bytes.

    Raises:
        InputError: says why they cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist (looked from {os.getcwd()}): check the path, or write the "
            "file first"
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give a file in it") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; check the file and its permissions"
        ) from None


def decode_lines(data: bytes, path: FilePath) -> list[str]:
    r"""Split UTF-8 bytes into lines at `\n` and `\r\n` only.

    `str.splitlines` would also split at U+0085, U+2028 and others that stand inside
    sentences, and line n would no longer translate line n.

    Args:
        data: the bytes of a text file; a byte order mark is dropped.
        path: where they come from, for messages.

    Returns:
        The lines without their ends.

    Raises:
        InputError: the bytes are not UTF-8; says the line and the byte.

    Example:

    >>> decode_lines(b"one\r\ntwo\n", "numbers.txt")
    ['one', 'two']
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise InputError(
            f"{path}, line {number}: byte 0x{data[error.start]:02x} at column {column} is not "
            f"UTF-8 ({error.reason}): convert the file, for instance with iconv -f latin1 -t utf-8"
        ) from None
    lines = text.split("\n")
    if lines[-1] == "":  # what follows the last line end is no line
        lines.pop()
    return [line[:-1] if line.endswith("\r") else line for line in lines]


def write_text_atomically(path: FilePath, text: str) -> None:
    """Write text as UTF-8, line ends as they are; see `write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: FilePath, data: bytes) -> None:
    """Write a file so that it is complete or not there.

    Args:
        path: the file to write. Folders above it are made where they are missing.
        data: what to write.

    Raises:
        InputError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; choose another place, or check the "
            "permissions and the space there"
        ) from None
