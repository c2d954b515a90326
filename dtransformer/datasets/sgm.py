"""WMT's SGM files: one `<seg id="…">text</seg>` a line, grouped in documents.

The files look like XML and are not: ampersands are not escaped, nothing is, and
segment ids restart in every document. They are therefore read line by line.
"""

from collections.abc import Iterable, Sequence

from dtransformer.datasets.text_files import (
    WHITE_SPACE,
    FilePath,
    decode_lines,
    read_bytes,
    write_text_atomically,
)
from dtransformer.errors import InputError

_SEGMENT = "<seg id"
_SEGMENT_END = "</seg>"


def write_sgm(
    path: FilePath,
    segments: Iterable[str],
    language: str,
    set_id: str,
    kind: str = "refset",
    segments_per_document: int = 20,
) -> None:
    """Write sentences as an SGM file in WMT14's form.

    The file is complete or not there. Nothing is escaped, as in WMT's own files.

    Args:
        path: the file to write. Folders above it are made where they are missing.
        segments: sentences without line breaks.
        language: language of the text, such as `"fr"`.
        set_id: name of the set, such as `"newstest2014"`.
        kind: `"refset"` (a reference translation) or `"srcset"` (a source text).
        segments_per_document: number of sentences of a document; ids restart in each.

    Raises:
        InputError: a segment cannot stand in an SGM file, the kind is unknown, or the file
            cannot be written.

    Example:

    >>> write_sgm("data/train.fr.sgm", ["Bonjour .", "Salut !"], "fr", "train")
    """
    if kind not in ("refset", "srcset"):
        raise InputError(f'kind={kind!r} is unknown: use "refset" or "srcset"')
    if segments_per_document < 1:
        raise InputError(f"segments_per_document={segments_per_document} must be at least 1")
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
                f"{_SEGMENT_END} cannot stand in an SGM segment; replace it by a space"
            )
        position = (count - 1) % segments_per_document
        if position == 0:
            if count > 1:
                lines.append("</doc>")
            document = (count - 1) // segments_per_document + 1
            lines.append(
                f'<doc {system}docid="{set_id}-{document}" genre="{set_id}" origlang="{language}">'
            )
        lines.append(f'<seg id="{position + 1}">{segment.strip(WHITE_SPACE)}</seg>')
    if count:
        lines.append("</doc>")
    lines.append(f"</{kind}>")
    write_text_atomically(path, "".join(line + "\n" for line in lines))


def read_sgm(path: FilePath) -> list[str]:
    """Read the segments of an SGM file.

    A line is a segment where it begins with `<seg id`; its text lies between the first `>`
    and `</seg>`. White space around the text is dropped, no-break spaces stay.

    Args:
        path: the file, UTF-8.

    Returns:
        The segments in the order of the file.

    Raises:
        InputError: the file is missing or not UTF-8, or a segment lacks its end; says the line.

    Example:

    >>> write_sgm("two.en.sgm", ["Good morning.", "Good night."], "en", "greetings")
    >>> read_sgm("two.en.sgm")
    ['Good morning.', 'Good night.']
    """
    return parse_sgm(decode_lines(read_bytes(path), path), path)


def parse_sgm(lines: Iterable[str], path: FilePath) -> list[str]:
    """Return the segments in the lines of an SGM file; `path` is for messages only."""
    segments = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(_SEGMENT):
            segments.append(_segment_text(line, number, path))
    return segments


def read_sgm_pairs(source: FilePath, target: FilePath) -> list[tuple[str, str]]:
    """Read two SGM files that translate each other line by line.

    Line n of one file belongs to line n of the other, so both must have a segment with
    the same id there, or neither a segment.

    Args:
        source: SGM file of the source language.
        target: SGM file of the target language.

    Returns:
        The pairs `(source, target)`.

    Raises:
        InputError: the files do not match, with the first line of both that does not; and what
            `read_sgm` raises.

    Example:

    >>> write_sgm("one.en.sgm", ["Good morning."], "en", "greetings")
    >>> write_sgm("one.fr.sgm", ["Bonjour."], "fr", "greetings")
    >>> read_sgm_pairs("one.en.sgm", "one.fr.sgm")
    [('Good morning.', 'Bonjour.')]
    """
    source_lines = decode_lines(read_bytes(source), source)
    return pair_sgm(source_lines, decode_lines(read_bytes(target), target), source, target)


def pair_sgm(
    source_lines: Sequence[str], target_lines: Sequence[str], source: FilePath, target: FilePath
) -> list[tuple[str, str]]:
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
                "set in which line n translates line n"
            )
        source_line, target_line = source_lines[number - 1], target_lines[number - 1]
        if _segment_tag(source_line) != _segment_tag(target_line):
            raise InputError(
                f"{source} and {target} do not match at line {number}: "
                f"{_shorten(source_line)} stands against {_shorten(target_line)}. Use two files "
                "of the same set in which line n translates line n"
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
            "begins and ends on one line; correct the line or fetch the file again"
        )
    return line[begin + 1 : end].strip(WHITE_SPACE)


def _segment_tag(line):
    """`<seg id="7"` of a segment's line, None for any other line."""
    return line.partition(">")[0] if line.startswith(_SEGMENT) else None


def _without_blank_end(lines):
    end = len(lines)
    while end and not lines[end - 1].strip(WHITE_SPACE):
        end -= 1
    return lines[:end]


def _shorten(text, limit=60):
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
