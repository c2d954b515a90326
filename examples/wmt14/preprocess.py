"""Write the sample's two files from WMT14's newstest2014, French and English.

WMT's SGM files have one `<seg id="…">text</seg>` a line, grouped in documents. They look like XML and
are not: ampersands are not escaped, nothing is, and segment ids restart in every document. They are
therefore read line by line, and a line that is neither a segment nor tags is refused: no text is
passed by.

curl -fsSL http://statmt.org/wmt14/test-full.tgz | tar xz
python examples/wmt14/preprocess.py --source test-full --verify --out data/wmt14
"""

import argparse
import hashlib
import itertools
import os
import pathlib
import re
import sys

from dtransformer.datasets import read_lines
from dtransformer.errors import InputError, shown

ENGLISH = "newstest2014-fren-ref.en.sgm"
FRENCH = "newstest2014-fren-ref.fr.sgm"
SHA256 = {
    ENGLISH: "c73727c954e92396eb3eed1b2730804a77130c1c3a8bc6a3f5646766fc92a8eb",
    FRENCH: "c57025c8a338c642fe3ad0206ddc75d258a5584e1d470b75f37af2fb666d7e93",
}
OUTPUTS = "wmt14.en_fr.txt", "wmt14.fr_en.txt"
_SEGMENT = re.compile(r"""(<seg id=(?:"[^"<>]*"|[^\s"<>]+))[^<>]*>(.*)</seg>\s*""", re.DOTALL)
_PART_OF_ONE = re.compile(r"<\s*/?\s*seg\b", re.IGNORECASE)
_TAGS = re.compile(r"\s*(?:<[^<>]*>\s*)*")
_WHITE_SPACE = " \t\v\f"  # no-break spaces are text
_DOCUMENT = re.compile(r"""<doc\b[^<>]*\bdocid=("[^"<>]*"|[^\s"<>]+)""", re.IGNORECASE)


def prepare(
    source: str | os.PathLike, destination: str | os.PathLike, overwrite: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the sample's two files from WMT14's.

    A tab inside a sentence becomes a space.

    Args:
        source: a folder that holds the two newstest2014 files.
        destination: the folder to write `wmt14.en_fr.txt` (english TAB french) and
            `wmt14.fr_en.txt` (french TAB english) to.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        The two paths.

    Raises:
        InputError: a file is missing, or the two do not match; names the first line that does not.
            Or one of the two is there with other content.
    """
    paths = [pathlib.Path(source) / name for name in (ENGLISH, FRENCH)]
    pairs = read_sgm_pairs(*paths)
    if not pairs:
        raise InputError(
            f"{paths[0]} and {paths[1]} hold no segment: expected lines that begin with '<seg id'"
        )
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    paths = [pathlib.Path(destination) / name for name in OUTPUTS]
    for path, order in zip(paths, (1, -1)):
        text = "".join("\t".join(pair[::order]) + "\n" for pair in pairs)
        if path.exists() and not overwrite and path.read_text("utf-8") != text:
            raise InputError(f"{path} is there with other content: give --overwrite")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return tuple(paths)


def read_sgm_pairs(source: str | os.PathLike, target: str | os.PathLike) -> list[tuple[str, str]]:
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
            `parsed` raises.
    """
    sides = parsed(source), parsed(target)
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


def parsed(path: str | os.PathLike) -> list[tuple[str, str]]:
    """Return for each line (text, `<seg id="7">`) of a segment, or (line, "") of tags.

    A line is a segment where it begins with `<seg id=`, and ends with `</seg>`. White space around
    the text is dropped, no-break spaces stay.

    Raises:
        InputError: the file is missing or not UTF-8, or a line is neither a segment nor tags, such
            as one with two segments; says the line.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        match = _SEGMENT.fullmatch(line)
        if match and not _PART_OF_ONE.search(match[2]):
            found.append((match[2].strip(_WHITE_SPACE), f"{match[1]}>"))
        elif match or _PART_OF_ONE.search(line) or not _TAGS.fullmatch(line):
            raise InputError(
                f'{path}, line {number}: expected one segment, <seg id="1">text</seg>, from the '
                f"line's beginning to its end, or tags, found {shown(line)}: correct the line, or "
                "fetch the file again"
            )
        else:
            found.append((line, ""))
    return found


def verify(folder: str | os.PathLike) -> None:
    """Check that a folder holds the two official files.

    Raises:
        InputError: a file is missing or has another SHA-256.
    """
    for name, expected in SHA256.items():
        path = pathlib.Path(folder) / name
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise InputError(
                f"{path} has SHA-256 {digest}, expected {expected}: the download is damaged, or the "
                "file was changed; download it again"
            )


def main() -> None:
    """Prepare what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a folder with the two .sgm files")
    parser.add_argument("--verify", action="store_true", help="compare them with their checksums")
    parser.add_argument("--out", default="data/wmt14")
    parser.add_argument("--overwrite", action="store_true", help="replace files of other content")
    args = parser.parse_args()
    try:
        if args.verify:
            verify(args.source)
        for path in prepare(args.source, args.out, args.overwrite):
            print(path)
    except (InputError, OSError) as error:
        sys.exit(f"preprocess.py: {error}")


if __name__ == "__main__":
    main()
