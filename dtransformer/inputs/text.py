r"""Decoding bytes to lines of text."""

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

WHITE_SPACE = " \t\v\f\r\n"  # Separators of words. A no-break space is text.
MAX_LINE = 2**17  # Maximum number of characters of a sentence. Tokenizers process complete lines.
MAX_DOCUMENT = 64 * MEBIBYTE  # Maximum number of bytes or characters of a document.
STANDARD_INPUT = "standard input"
_BYTES_PER_LINE = 120  # Memory of a short Python string.
_UNSUPPORTED_ARCHIVES = ".zst", ".bz2", ".xz", ".lz4", ".zip"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text_lines(path: FilePath) -> list[str]:
    """Return the lines of a UTF-8 text file, decompressed if its name ends in `.gz`.

    Lines are separated as in `decode_lines`.

    Raises:
        InputError: If the file is missing, damaged or too large, or `decode_lines` fails.
    """
    with opened(path) as file:
        if str(path).endswith(".gz"):
            data = b"".join(unpacked(file, path))
        else:
            data = read_limited(file, path)
    return decode_lines(data, path)


def read_input_lines(fix: str) -> list[str]:
    """Return the lines of standard input.

    Args:
        fix: Sentence with the fix, the end of the error message.

    Raises:
        InputError: If standard input is closed or too large, or `decode_lines` fails.
    """
    if sys.stdin is None:
        raise InputError(f"Standard input is closed. {fix}")
    return decode_lines(read_limited(sys.stdin.buffer, STANDARD_INPUT), STANDARD_INPUT)


def iterate_lines(path: FilePath) -> Iterator[tuple[int, str]]:
    """Yield `(line_number, line)` tuples of a file of any size, read in blocks.

    Line numbers start at 1. Lines end only at `\\n` and `\\r\\n`, as in `decode_lines`.

    Args:
        path: Path of a UTF-8 text file, decompressed if its name ends in `.gz`.

    Raises:
        InputError: If the file is missing, damaged or not UTF-8, or a line is too long. The message
            names the line.
    """
    with opened(path) as file:
        if str(path).endswith(".gz"):
            blocks = unpacked(file, path, limit=sys.maxsize)
        else:
            blocks = iter(lambda: file.read(MEBIBYTE), b"")
        line_number = 1
        rest = bytearray()
        for block in itertools.chain(blocks, [None]):
            rest += block or b""
            end = len(rest) if block is None else rest.rfind(b"\n", len(rest) - len(block)) + 1
            if len(rest) - end > MAX_DOCUMENT:
                num_earlier = rest.count(b"\n", 0, end)
                raise InputError(
                    f"{path}, line {line_number + num_earlier} has more than {MAX_DOCUMENT:,} bytes, "
                    "the limit for a document. Split it, or write a JSON list as JSON lines."
                )
            lines = decode(bytes(rest[:end]), path, line_number).split("\n")
            del rest[:end]
            if lines[-1] == "":  # The text after the last line break is not a line.
                lines.pop()
            for line in lines:
                yield line_number, line.removesuffix("\r")
                line_number += 1


def decode(data: bytes, path: FilePath, first_line: int = 1) -> str:
    """Decode UTF-8 bytes. A byte order mark at the beginning of a file is removed.

    Args:
        data: Bytes of complete lines.
        path: Path of their file, for error messages.
        first_line: Integer. Line number of the first byte. Defaults to 1.

    Raises:
        InputError: If the bytes are not UTF-8 or contain NUL. The message names the line and the
            byte and how to convert the file.
    """
    if first_line == 1:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        text = data.decode("utf-8")
        start = data.find(b"\0")
        reason = "text has no NUL; is it UTF-16?"
    except UnicodeDecodeError as error:
        start = error.start
        reason = error.reason
    if start < 0:
        return text
    line_number = data.count(b"\n", 0, start) + first_line
    column = start - (data.rfind(b"\n", 0, start) + 1) + 1
    if str(path).lower().endswith(_UNSUPPORTED_ARCHIVES):
        fix = "Decompress the file first, because only .gz files are decompressed."
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        fix = "Convert the file with iconv -f utf-16 -t utf-8."
    elif data[:start].isascii():
        fix = "Convert the file, for example with iconv -f latin1 -t utf-8."
    else:
        fix = (
            "Text before it is UTF-8. Correct the line, or drop such bytes with iconv -c -t utf-8."
        )
    raise InputError(
        f"{path}, line {line_number}: Byte 0x{data[start]:02x} at column {column} is not UTF-8 text "
        f"({reason}). {fix}"
    )


def check_whole(text: str, place: FilePath) -> str:
    """Return a text, and check that it contains no half of a surrogate pair.

    Such halves come from escapes in JSON and from bytes in command-line options that are not UTF-8.

    Args:
        text: The text.
        place: Origin of the text, for error messages.

    Raises:
        InputError: If the text contains one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}, character {error.start + 1}: {describe_invalid_character(error)}"
        ) from None
    return text


def describe_invalid_character(error: UnicodeEncodeError) -> str:
    """Describe the half of a surrogate pair, or the invalid byte, that caused an encoding error."""
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:
        return f"Byte 0x{code - 0xDC00:02x} is not UTF-8 text. Write the text in UTF-8."
    return f"U+{code:04X} is half of a surrogate pair. Write the complete character."


def whole_texts(texts: Iterable[str]) -> list[str]:
    """Return an iterable of texts as a list, after `check_whole` of each one.

    Raises:
        InputError: If `texts` is a single string, or `check_whole` fails.
    """
    if isinstance(texts, (str, bytes)):
        raise InputError("Expected a list of texts, got a single one. Put the string into a list.")
    texts = list(texts)
    for index, text in enumerate(texts, start=1):
        if not text.isascii():
            check_whole(text, f"text {index} of {len(texts)}")
    return texts


def decode_lines(data: bytes, path: FilePath) -> list[str]:
    r"""Split UTF-8 bytes into lines at `\n` and `\r\n` only.

    `str.splitlines` would also split at U+0085, U+2028 and other characters inside sentences. Line
    n would then no longer translate line n of another file.

    Args:
        data: Bytes of a text file. A byte order mark is removed.
        path: Path of the file, for error messages.

    Returns:
        List of lines without their line breaks.

    Raises:
        InputError: If the bytes are not UTF-8, a line is longer than `MAX_LINE`, or the lines need
            more than half of the free memory.

    Example:

    >>> decode_lines(b"one\r\ntwo\n", "numbers.txt")
    ['one', 'two']
    """
    needed = 3 * len(data) + _BYTES_PER_LINE * data.count(b"\n")
    if needed > free_memory() // 2:
        raise InputError(
            f"{path}: Its lines would need {needed:,} bytes, more than half of the free memory. Split "
            "the file."
        )
    lines = decode(data, path).split("\n")
    if lines[-1] == "":  # The text after the last line break is not a line.
        lines.pop()
    for line_number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise InputError(
                f"{path}, line {line_number} has {len(line):,} characters, expected at most "
                f"{MAX_LINE:,}. Write one sentence per line."
            )
    return [line[:-1] if line.endswith("\r") else line for line in lines]
