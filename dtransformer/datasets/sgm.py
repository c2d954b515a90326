"""WMT's SGM files: one `<seg id="…">text</seg>` a line, grouped in documents.

The files look like XML and are not: an ampersand stands bare, nothing is escaped, and
segment ids restart in every document. They are therefore read line by line.

The helpers at the end turn bytes into lines and text into files for every reader and
writer of this package.
"""

import os
from pathlib import Path

from dtransformer.errors import InputError

_SEGMENT = "<seg id"
_SEGMENT_END = "</seg>"
_WHITE_SPACE = " \t\v\f\r\n"  # what is stripped; a no-break space is text


def write_sgm(path, segments, language, set_id, kind="refset", segments_per_document=20):
    """Writes sentences as an SGM file in WMT14's form.

    The file appears whole or not at all. Nothing is escaped, as in WMT's own files.

    Args:
        path: The file to write. Folders above it are made where they are missing.
        segments: Sentences, an iterable of strings without line breaks.
        language: Language of the text, such as `"fr"`.
        set_id: Name of the set, such as `"newstest2014"`.
        kind: `"refset"` (a reference translation) or `"srcset"` (a source text).
        segments_per_document: How many sentences a document holds; ids restart in each.

    Raises:
        InputError: A segment that the form cannot hold, an unknown kind, a place that
            cannot be written.

    Example:
        >>> write_sgm("data/train.fr.sgm", ["Bonjour .", "Salut !"], "fr", "train")
    """
    if kind not in ("refset", "srcset"):
        raise InputError(f'kind={kind!r} is unknown: use "refset" or "srcset".')
    if segments_per_document < 1:
        raise InputError(f"segments_per_document={segments_per_document} must be at least 1.")
    if kind == "refset":
        lines = [f'<refset trglang="{language}" setid="{set_id}" srclang="any">']
        system = 'sysid="ref" '
    else:
        lines = [f'<srcset setid="{set_id}" srclang="{language}">']
        system = ""
    count = 0
    for count, segment in enumerate(segments, start=1):
        if "\n" in segment or "\r" in segment or _SEGMENT_END in segment:
            raise InputError(
                f"segment {count} for {path} is {_shorten(segment)}: a line break or "
                f"{_SEGMENT_END} cannot stand in an SGM segment; replace it by a space."
            )
        position = (count - 1) % segments_per_document
        if position == 0:
            if count > 1:
                lines.append("</doc>")
            document = (count - 1) // segments_per_document + 1
            lines.append(
                f'<doc {system}docid="{set_id}-{document}" genre="{set_id}" origlang="{language}">'
            )
        lines.append(f'<seg id="{position + 1}">{segment.strip(_WHITE_SPACE)}</seg>')
    if count:
        lines.append("</doc>")
    lines.append(f"</{kind}>")
    write_text_atomically(path, "".join(line + "\n" for line in lines))


def read_sgm(path):
    """Reads the segments of an SGM file.

    A line counts where it begins with `<seg id`; its text lies between the first `>`
    and `</seg>`. White space around the text is dropped, no-break spaces stay.

    Args:
        path: The file, UTF-8.

    Returns:
        The segments in the order of the file, a list of strings.

    Raises:
        InputError: A missing file, bytes that are not UTF-8, or a segment without its
            end, each with the line.

    Example:
        >>> write_sgm("two.en.sgm", ["Good morning.", "Good night."], "en", "greetings")
        >>> read_sgm("two.en.sgm")
        ['Good morning.', 'Good night.']
    """
    return parse_sgm(decode_lines(read_bytes(path), path), path)


def parse_sgm(lines, path):
    """Returns the segments in the lines of an SGM file; `path` is for messages only."""
    segments = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(_SEGMENT):
            segments.append(_segment_text(line, number, path))
    return segments


def read_sgm_pairs(source, target):
    """Reads two SGM files that translate each other line by line.

    Line n of one file belongs to line n of the other, so both must hold a segment with
    the same id there, or neither a segment.

    Args:
        source: SGM file of the source language.
        target: SGM file of the target language.

    Returns:
        A list of `(source, target)` pairs of strings.

    Raises:
        InputError: Files that do not match, with the first bad line of both; and what
            `read_sgm` raises.

    Example:
        >>> write_sgm("one.en.sgm", ["Good morning."], "en", "greetings")
        >>> write_sgm("one.fr.sgm", ["Bonjour."], "fr", "greetings")
        >>> read_sgm_pairs("one.en.sgm", "one.fr.sgm")
        [('Good morning.', 'Bonjour.')]
    """
    source_lines = decode_lines(read_bytes(source), source)
    return pair_sgm(source_lines, decode_lines(read_bytes(target), target), source, target)


def pair_sgm(source_lines, target_lines, source, target):
    """As `read_sgm_pairs`, from lines; `source` and `target` name them in messages."""
    source_lines = _without_blank_end(source_lines)
    target_lines = _without_blank_end(target_lines)
    pairs = []
    for number in range(1, max(len(source_lines), len(target_lines)) + 1):
        if number > min(len(source_lines), len(target_lines)):
            shorter = source if len(source_lines) < len(target_lines) else target
            raise InputError(
                f"{source} and {target} do not match at line {number}: {shorter} ends before it "
                f"({len(source_lines)} and {len(target_lines)} lines). Use two files of the same "
                f"set in which line n translates line n."
            )
        source_line, target_line = source_lines[number - 1], target_lines[number - 1]
        if _segment_tag(source_line) != _segment_tag(target_line):
            raise InputError(
                f"{source} and {target} do not match at line {number}: "
                f"{_shorten(source_line)} stands against {_shorten(target_line)}. Use two files "
                f"of the same set in which line n translates line n."
            )
        if source_line.startswith(_SEGMENT):
            pairs.append(
                (
                    _segment_text(source_line, number, source),
                    _segment_text(target_line, number, target),
                )
            )
    return pairs


def _segment_text(line, number, path):
    begin = line.find(">")
    end = line.find(_SEGMENT_END, begin + 1)
    if begin < 0 or end < 0:
        missing = "> of its tag" if begin < 0 else _SEGMENT_END
        raise InputError(
            f"{path}, line {number}: a segment without {missing}: {_shorten(line)}. A segment "
            f"begins and ends on one line; mend the line or fetch the file again."
        )
    return line[begin + 1 : end].strip(_WHITE_SPACE)


def _segment_tag(line):
    """`<seg id="7"` of a segment's line, None for any other line."""
    return line.partition(">")[0] if line.startswith(_SEGMENT) else None


def _without_blank_end(lines):
    end = len(lines)
    while end and not lines[end - 1].strip(_WHITE_SPACE):
        end -= 1
    return lines[:end]


def _shorten(text, limit=60):
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


# Bytes and files -----------------------------------------------------------------------


def read_bytes(path):
    """Returns a file's bytes, or raises InputError saying why they cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist (looked from {os.getcwd()}): check the path, or write the "
            f"file first."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name a file in it.") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}. Check the file and its permissions."
        ) from None


def decode_lines(data, path):
    """Splits UTF-8 bytes into lines at `\\n` and `\\r\\n` only.

    `str.splitlines` would also cut at U+0085, U+2028 and others that stand inside
    sentences, and line n would no longer translate line n.

    Args:
        data: The bytes of a text file; a byte order mark is dropped.
        path: Where they come from, for messages.

    Returns:
        The lines without their ends, a list of strings.

    Raises:
        InputError: Bytes that are not UTF-8, with the line and the byte.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise InputError(
            f"{path}, line {number}: byte 0x{data[error.start]:02x} at column {column} is not "
            f"UTF-8 ({error.reason}). Convert the file, for instance with iconv -f latin1 -t utf-8."
        ) from None
    lines = text.split("\n")
    if lines[-1] == "":  # what follows the last line end is no line
        lines.pop()
    return [line[:-1] if line.endswith("\r") else line for line in lines]


def write_text_atomically(path, text):
    """Writes text as UTF-8, line ends as they are; see `write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path, data):
    """Writes a file so that it is seen whole or not at all.

    Args:
        path: The file to write. Folders above it are made where they are missing.
        data: What to write.

    Raises:
        InputError: The place cannot be written.
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
            f"{path} cannot be written: {error.strerror}. Choose another place or mend the "
            f"permissions or the space there."
        ) from None
