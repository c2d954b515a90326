r"""Bytes to lines of text."""

from dtransformer.errors import InputError
from dtransformer.inputs.archives import unpacked
from dtransformer.inputs.files import opened, read_limited
from dtransformer.inputs.machine import free_memory
from dtransformer.inputs.paths import FilePath

WHITE_SPACE = " \t\v\f\r\n"  # what separates words; a no-break space is text
MAX_LINE = 2**17  # bytes: no sentence is as long, and a tokenizer takes a line at a time
_BYTES_OF_A_LINE = 120  # that Python takes for a short one
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


def decode(data: bytes, path: FilePath) -> str:
    """Return the text of UTF-8 bytes; a byte order mark is dropped.

    Args:
        data: the bytes.
        path: where they come from, for messages.

    Raises:
        InputError: the bytes are not UTF-8 text; says the line and the byte.
    """
    data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        text, start, why = data.decode("utf-8"), data.find(b"\0"), "text has none; is it UTF-16?"
    except UnicodeDecodeError as error:
        start, why = error.start, error.reason
    if start < 0:
        return text
    number = data.count(b"\n", 0, start) + 1
    column = start - (data.rfind(b"\n", 0, start) + 1) + 1
    raise InputError(
        f"{path}, line {number}: byte 0x{data[start]:02x} at column {column} is not "
        f"UTF-8 text ({why}): convert the file, for instance with iconv -f latin1 -t utf-8"
    )


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
