"""Convert newstest2014 of WMT14, French and English, to two tab-separated files.

WMT's SGM files have one `<seg id="…">text</seg>` per line, grouped in documents. They are not XML:
ampersands are not escaped, and segment ids restart in every document. This script reads them line by
line and raises an error for a line that is neither a segment nor tags, so that no text is lost.

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
from dtransformer.errors import InputError, short_repr

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
_WHITE_SPACE = " \t\v\f"  # No-break spaces belong to the text.
_DOCUMENT = re.compile(r"""<doc\b[^<>]*\bdocid=("[^"<>]*"|[^\s"<>]+)""", re.IGNORECASE)


def prepare(
    source: str | os.PathLike, destination: str | os.PathLike, overwrite: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the two tab-separated files.

    Tabs in sentences become spaces.

    Args:
        source: Folder with the two newstest2014 files.
        destination: Folder for `wmt14.en_fr.txt` (English TAB French) and
            `wmt14.fr_en.txt` (French TAB English).
        overwrite: Whether to replace files with different content.

    Returns:
        A tuple of the two paths.

    Raises:
        InputError: If a file is missing, the two files do not match, or an output file exists with
            different content.
    """
    paths = [pathlib.Path(source) / name for name in (ENGLISH, FRENCH)]
    pairs = read_sgm_pairs(*paths)
    if not pairs:
        raise InputError(
            f"{paths[0]} and {paths[1]} have no segments: expected lines that start with '<seg id'."
        )
    pairs = [tuple(side.replace("\t", " ") for side in pair) for pair in pairs]
    paths = [pathlib.Path(destination) / name for name in OUTPUTS]
    for path, order in zip(paths, (1, -1)):
        text = "".join("\t".join(pair[::order]) + "\n" for pair in pairs)
        if path.exists() and not overwrite and path.read_text("utf-8") != text:
            raise InputError(
                f"{path} exists with different content. Use --overwrite to replace it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return tuple(paths)


def read_sgm_pairs(source: str | os.PathLike, target: str | os.PathLike) -> list[tuple[str, str]]:
    """Read two SGM files that are translations of each other, line by line.

    Line n of both files must have the same segment id, or no segment. Ids of documents must
    also match.

    Args:
        source: SGM file of the source language.
        target: SGM file of the target language.

    Returns:
        List of `(source, target)` pairs.

    Raises:
        InputError: If the files do not match, with the first different line, or if `parse_sgm`
            rejects a file.
    """
    sides = parse_sgm(source), parse_sgm(target)
    lengths = [max((n for n, line in enumerate(side, 1) if any(line)), default=0) for side in sides]
    pairs = []
    for line_number, lines in enumerate(itertools.zip_longest(*sides, fillvalue=("", "")), start=1):
        if line_number > max(lengths):
            break
        (source_text, source_tag), (target_text, target_tag) = lines
        if line_number > min(lengths):
            shorter = source if lengths[0] < lengths[1] else target
            raise InputError(
                f"{source} and {target} do not match at line {line_number}: {shorter} ends before it "
                f"({lengths[0]} and {lengths[1]} lines). Use two files of the same set, aligned by line."
            )
        documents = [_DOCUMENT.search(text) for text, tag in lines if not tag]
        same_document = not all(documents) or len({match[1] for match in documents}) < 2
        if source_tag != target_tag or not same_document:
            raise InputError(
                f"{source} and {target} do not match at line {line_number}: "
                f"{short_repr(source_tag + source_text)} and "
                f"{short_repr(target_tag + target_text)}. Use two files of the same set, aligned "
                "by line."
            )
        if source_tag:
            pairs.append((source_text, target_text))
    return pairs


def parse_sgm(path: str | os.PathLike) -> list[tuple[str, str]]:
    """Return `(text, '<seg id="7">')` for each segment line and `(line, "")` for each line of tags.

    A segment starts with `<seg id=` and ends with `</seg>`. White space around the text is removed,
    except for no-break spaces.

    Raises:
        InputError: If the file is missing or not UTF-8, or if a line is neither a segment nor tags,
            such as a line with two segments.
    """
    lines = []
    for line_number, line in enumerate(read_lines(path), start=1):
        match = _SEGMENT.fullmatch(line)
        if match and not _PART_OF_ONE.search(match[2]):
            lines.append((match[2].strip(_WHITE_SPACE), f"{match[1]}>"))
        elif match or _PART_OF_ONE.search(line) or not _TAGS.fullmatch(line):
            raise InputError(
                f'{path}, line {line_number}: expected one segment, <seg id="1">text</seg>, or tags, '
                f"got {short_repr(line)}. Correct the line or download the file again."
            )
        else:
            lines.append((line, ""))
    return lines


def verify(folder: str | os.PathLike) -> None:
    """Check that a folder contains the two official files.

    Raises:
        InputError: If a file has a different SHA-256.
        OSError: If a file cannot be read.
    """
    for name, expected in SHA256.items():
        path = pathlib.Path(folder) / name
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise InputError(
                f"{path} has the SHA-256 {digest}, expected {expected}. The file is damaged or was "
                "changed. Download it again."
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="folder with the two .sgm files")
    parser.add_argument("--verify", action="store_true", help="check the SHA-256 of both files")
    parser.add_argument("--out", default="data/wmt14")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files with different content"
    )
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
