"""Reading sentences and sentence pairs from files, and cleaning pairs."""

import re
from collections.abc import Sequence

from dtransformer.errors import InputError
from dtransformer.inputs.files import FilePath
from dtransformer.inputs.text import WHITE_SPACE, read_text_lines

_WHITE_SPACE_RUN = re.compile(f"[{WHITE_SPACE}]+")


def read_lines(path: FilePath) -> list[str]:
    """Read a file with one sentence per line.

    Args:
        path: Path of a UTF-8 text file. It is decompressed if its name ends in `.gz`.

    Returns:
        List of sentences, one per line, without white space at the ends. Blank lines become
        empty strings.

    Raises:
        InputError: If the file is missing, damaged, not UTF-8 or too large. The message names the
            line.
    """
    return [line.strip(WHITE_SPACE) for line in read_text_lines(path)]


def refuse_sgm(path: FilePath) -> None:
    """Refuse SGM files, whose lines contain sentences between tags.

    Raises:
        InputError: If the name ends in `.sgm` or `.sgm.gz`.
    """
    if str(path).lower().removesuffix(".gz").endswith(".sgm"):
        raise InputError(
            f"{path}: SGM files are not supported. Convert the file to text with one segment per "
            "line, as examples/wmt14/preprocess.py does for WMT14."
        )


def read_pairs(source: FilePath, target: FilePath) -> tuple[list[str], list[str]]:
    """Read two files with parallel lines: line n of `target` translates line n of `source`.

    Args:
        source: Path of the source sentences. See `read_lines` for the format.
        target: Path of their translations.

    Returns:
        A `(sources, targets)` tuple of lists with equal length.

    Raises:
        InputError: If the files have different numbers of lines, if one contains no sentence or
            is an SGM file, or if `read_lines` fails.
    """
    for path in (source, target):
        refuse_sgm(path)
    lines = read_lines(source), read_lines(target)
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} sentences and {target} has {len(lines[1])}. Line n of one "
            "file must translate line n of the other."
        )
    if not any(lines[0]) or not any(lines[1]):
        empty_file = target if any(lines[0]) else source
        raise InputError(
            f"{empty_file} contains no sentences. Give a file with one sentence per line."
        )
    return lines


def read_tsv(path: FilePath) -> tuple[list[str], list[str]]:
    """Read sentence pairs from a file with `source TAB target` on each line.

    Args:
        path: Path of a UTF-8 text file. It is decompressed if its name ends in `.gz`.

    Returns:
        A `(sources, targets)` tuple of lists with equal length.

    Raises:
        InputError: If a line has no tab or several tabs, if the file is empty, or if it is
            missing, damaged or not UTF-8. The message names the line.
    """
    sources = []
    targets = []
    for line_number, line in enumerate(read_text_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise InputError(
                f"{path}, line {line_number}: Expected 'source TAB target', got {len(columns) - 1} "
                "tabs. Separate the two sentences with one tab."
            )
        sources.append(columns[0].strip(WHITE_SPACE))
        targets.append(columns[1].strip(WHITE_SPACE))
    if not sources:
        raise InputError(f"{path} contains no sentence pairs. Expected 'source TAB target' lines.")
    return sources, targets


def clean_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    max_ratio: float | None = None,
    distinct: bool = False,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Remove empty, uneven and repeated sentence pairs.

    Runs of white space become one space first. No-break spaces are kept.

    Args:
        sources: List of sentences.
        targets: List of their translations.
        max_ratio: Float. A pair is removed if one side has more than `max_ratio` times as many
            words as the other, unless they differ by three words or fewer. `None` disables this
            check.
        distinct: Boolean. Whether to remove repetitions of an earlier pair. Defaults to `False`.

    Returns:
        A `(sources, targets, counts)` tuple: the remaining sentences, two lists of equal length,
        and a dict with the number of pairs that were `kept`, `empty`, `uneven` or `repeated`.

    Raises:
        InputError: If the lists differ in length.

    Example:

    >>> clean_pairs(["One  two.", ""], ["Un deux.", "Trois."])[:2]
    (['One two.'], ['Un deux.'])
    """
    if len(sources) != len(targets):
        raise InputError(
            f"Got {len(sources)} sources and {len(targets)} targets. Give two lists of equal length."
        )
    pairs = []
    seen = set()
    counts = dict.fromkeys(("kept", "empty", "uneven", "repeated"), 0)
    for pair in zip(sources, targets):
        pair = tuple(_WHITE_SPACE_RUN.sub(" ", side).strip(" ") for side in pair)
        reason = _reason_against(pair, max_ratio)
        if reason is None and distinct and pair in seen:
            reason = "repeated"
        counts[reason or "kept"] += 1
        if reason is None:
            pairs.append(pair)
            seen.add(pair)
    return [source for source, _ in pairs], [target for _, target in pairs], counts


def _reason_against(pair, max_ratio):
    lengths = sorted(len(side.split()) for side in pair)
    if lengths[0] == 0:
        return "empty"
    if max_ratio is not None and lengths[1] > max(max_ratio * lengths[0], lengths[0] + 3):
        return "uneven"
    return None
