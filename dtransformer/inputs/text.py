r"""Bytes to lines of text."""

import itertools
import sys
from collections.abc import Iterable, Iterator

from dtransformer.errors import InputError
from dtransformer.inputs.files import (
    MEBIBYTE,
    FilePath,
    free_memory,
    opened,
    read_limited,
    unpacked,
)

WHITE_SPACE = " \t\v\f\r\n"  # what separates words; a no-break space is text
MAX_LINE = 2**17  # bytes: no sentence is as long, and a tokenizer takes a line at a time
MAX_DOCUMENT = 64 * MEBIBYTE  # bytes
_BYTES_OF_A_LINE = 120  # that Python takes for a short one
_PACKED = ".zst", ".bz2", ".xz", ".lz4", ".zip"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text_lines(path: FilePath) -> list[str]:
    """Return the lines of a file of UTF-8 text, unpacked where its name ends in `.gz`.

    Raises:
        InputError: what `decode_lines` raises, and the file is missing, damaged or too large.
    """
    with opened(path) as file:
        if str(path).endswith(".gz"):
            data = b"".join(unpacked(file, path))
        else:
            data = read_limited(file, path)
    return decode_lines(data, path)


def iterate_lines(path: FilePath, limit: int = MAX_DOCUMENT) -> Iterator[tuple[int, str]]:
    """Return the lines of a file of any size with their numbers, from 1, read block by block.

    Lines end at `\\n` and `\\r\\n` only, as those of `decode_lines`.

    Args:
        path: a file of UTF-8 text, unpacked where its name ends in `.gz`.
        limit: the most bytes that a line may have.

    Raises:
        InputError: the file is missing, damaged or not UTF-8, or has too long a line; says the line.
    """
    with opened(path) as file:
        if str(path).endswith(".gz"):
            blocks = unpacked(file, path, limit=sys.maxsize)
        else:
            blocks = iter(lambda: file.read(MEBIBYTE), b"")
        number, rest = 1, bytearray()
        for block in itertools.chain(blocks, [None]):
            rest += block or b""
            end = len(rest) if block is None else rest.rfind(b"\n", len(rest) - len(block)) + 1
            if len(rest) - end > limit:
                earlier = rest.count(b"\n", 0, end)
                raise InputError(
                    f"{path}, line {number + earlier} has more than the "
                    f"{limit:,} bytes that a document may have: divide it; of a list, write JSON lines"
                )
            lines = decode(bytes(rest[:end]), path, number).split("\n")
            del rest[:end]
            if lines[-1] == "":  # what follows the last line end is no line
                lines.pop()
            for line in lines:
                yield number, line.removesuffix("\r")
                number += 1


def decode(data: bytes, path: FilePath, first_line: int = 1) -> str:
    """Return the text of UTF-8 bytes; a byte order mark at a file's beginning is dropped.

    Args:
        data: the bytes.
        path: where they come from, for messages.
        first_line: number of the line that they begin with.

    Raises:
        InputError: the bytes are not UTF-8 text; says the line and the byte.
    """
    if first_line == 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        text, start, why = data.decode("utf-8"), data.find(b"\0"), "text has none; is it UTF-16?"
    except UnicodeDecodeError as error:
        start, why = error.start, error.reason
    if start < 0:
        return text
    number = data.count(b"\n", 0, start) + first_line
    column = start - (data.rfind(b"\n", 0, start) + 1) + 1
    if str(path).lower().endswith(_PACKED):
        mend = "of packed files those of gzip are read, .gz: unpack it"
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        mend = "convert the file, with iconv -f utf-16 -t utf-8"
    elif data[:start].isascii():
        mend = "convert the file, for instance with iconv -f latin1 -t utf-8"
    else:
        mend = "what is before is UTF-8: mend the line, or drop such bytes with iconv -c -t utf-8"
    raise InputError(
        f"{path}, line {number}: byte 0x{data[start]:02x} at column {column} is not UTF-8 text "
        f"({why}): {mend}"
    )


def check_whole(text: str, place: FilePath) -> str:
    """Return a text that has no half of a surrogate pair, which is no character.

    They come of escapes in JSON, and of bytes in options that are not UTF-8.

    Raises:
        InputError: it has one; says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}, character {error.start + 1}: {half_told(error)}") from None
    return text


def half_told(error: UnicodeEncodeError) -> str:
    """Return what of a text is no character: a half of a surrogate pair, or a byte of an option."""
    number = ord(error.object[error.start])
    if 0xDC80 <= number <= 0xDCFF:
        return f"byte 0x{number - 0xDC00:02x} is not UTF-8 text: write it in UTF-8"
    return f"U+{number:04X} is half of a surrogate pair, and no character: write the whole one"


def whole_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list.

    Raises:
        InputError: If the texts are a single string, or see `check_whole`.
    """
    if isinstance(texts, (str, bytes)):
        raise InputError("expected a list of texts, got a single one: put the string into a list")
    texts = list(texts)
    for number, text in enumerate(texts, start=1):
        if not text.isascii():
            check_whole(text, f"text {number} of {len(texts)}")
    return texts


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
        InputError: the bytes are not UTF-8 text, a line is longer than a sentence can be, or there
            are more lines than the memory holds; says the line and the byte.

    Example:

    >>> decode_lines(b"one\r\ntwo\n", "numbers.txt")
    ['one', 'two']
    """
    need = 3 * len(data) + _BYTES_OF_A_LINE * data.count(b"\n")
    if need > free_memory() // 2:
        raise InputError(f"{path}: its lines would take {need:,} bytes of memory: split the file")
    lines = decode(data, path).split("\n")
    if lines[-1] == "":  # what follows the last line end is no line
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise InputError(
                f"{path}, line {number} has {len(line):,} characters, expected at most "
                f"{MAX_LINE:,}: give one sentence a line"
            )
    return [line[:-1] if line.endswith("\r") else line for line in lines]
