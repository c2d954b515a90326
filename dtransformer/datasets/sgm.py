"""WMT's SGM files: one `<seg id="…">text</seg>` a line, grouped in documents.

The files look like XML and are not: ampersands are not escaped, nothing is, and
segment ids restart in every document. They are therefore read line by line, and a line that is
neither a segment nor tags is refused: no text is passed by.
"""

import itertools
import re
from collections.abc import Iterable

from dtransformer.errors import InputError, check_int, shown
from dtransformer.inputs.files import FilePath, write_text_atomically
from dtransformer.inputs.text import WHITE_SPACE, read_text_lines

_SEGMENT = re.compile(r"""(<seg id=(?:"[^"<>]*"|[^\s"<>]+))[^<>]*>(.*)</seg>\s*""", re.DOTALL)
_PART_OF_ONE = re.compile(r"<\s*/?\s*seg\b", re.IGNORECASE)
_TAGS = re.compile(r"\s*(?:<[^<>]*>\s*)*")
_DOCUMENT = re.compile(r"""<doc\b[^<>]*\bdocid=("[^"<>]*"|[^\s"<>]+)""", re.IGNORECASE)


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
    check_int("segments_per_document", segments_per_document)
    if kind == "refset":
        lines = [f'<refset trglang="{language}" setid="{set_id}" srclang="any">']
        system = 'sysid="ref" '
    else:
        lines = [f'<srcset setid="{set_id}" srclang="{language}">']
        system = ""
    count = 0
    for count, segment in enumerate(segments, start=1):
        if set("\n\r\0").intersection(segment) or _PART_OF_ONE.search(segment):
            raise InputError(
                f"segment {count} for {path} is {shown(segment)}: a line break, a NUL, <seg or "
                "</seg> cannot stand in an SGM segment; replace it by a space"
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

    A line is a segment where it begins with `<seg id=`, and ends with `</seg>`. White space around
    the text is dropped, no-break spaces stay.

    Args:
        path: the file, UTF-8; unpacked first where its name ends in `.gz`.

    Returns:
        The segments in the order of the file.

    Raises:
        InputError: the file is missing or not UTF-8, or a line is neither a segment nor tags, such
            as one with two segments; says the line.

    Example:

    >>> write_sgm("two.en.sgm", ["Good morning.", "Good night."], "en", "greetings")
    >>> read_sgm("two.en.sgm")
    ['Good morning.', 'Good night.']
    """
    return [text for text, tag in _parsed(path) if tag]


def read_sgm_pairs(source: FilePath, target: FilePath) -> list[tuple[str, str]]:
    """Read two SGM files that translate each other line by line.

    Line n of one file belongs to line n of the other, so both must have a segment with
    the same id there, or neither a segment; and documents of the same id.

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
    sides = _parsed(source), _parsed(target)
    numbers = [max((n for n, line in enumerate(side, 1) if any(line)), default=0) for side in sides]
    pairs = []
    for number, lines in enumerate(itertools.zip_longest(*sides, fillvalue=("", "")), start=1):
        if number > max(numbers):
            break
        (source_text, source_tag), (target_text, target_tag) = lines
        if number > min(numbers):
            shorter = source if numbers[0] < numbers[1] else target
            raise InputError(
                f"{source} and {target} do not match at line {number}: {shorter} ends before it "
                f"({numbers[0]} and {numbers[1]} lines). Use two files of the same set in which "
                "line n translates line n"
            )
        documents = [_DOCUMENT.search(text) for text, tag in lines if not tag]
        same_document = not all(documents) or len({match[1] for match in documents}) < 2
        if source_tag != target_tag or not same_document:
            raise InputError(
                f"{source} and {target} do not match at line {number}: "
                f"{shown(source_tag + source_text)} stands against "
                f"{shown(target_tag + target_text)}. Use two files of the same set in which line n "
                "translates line n"
            )
        if source_tag:
            pairs.append((source_text, target_text))
    return pairs


def _parsed(path):
    """Return for each line (text, `<seg id="7">`) of a segment, or (line, "") of tags."""
    parsed = []
    for number, line in enumerate(read_text_lines(path), start=1):
        match = _SEGMENT.fullmatch(line)
        if match and not _PART_OF_ONE.search(match[2]):
            parsed.append((match[2].strip(WHITE_SPACE), f"{match[1]}>"))
        elif match or _PART_OF_ONE.search(line) or not _TAGS.fullmatch(line):
            raise InputError(
                f'{path}, line {number}: expected one segment, <seg id="1">text</seg>, from the '
                f"line's beginning to its end, or tags, found {shown(line)}: correct the line, or "
                "fetch the file again"
            )
        else:
            parsed.append((line.strip(WHITE_SPACE), ""))
    return parsed
