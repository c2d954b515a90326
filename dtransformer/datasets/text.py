"""Sentences and sentence pairs from files, and the cleaning of pairs."""

import re
from collections.abc import Sequence

from dtransformer.errors import InputError
from dtransformer.inputs.files import FilePath
from dtransformer.inputs.text import WHITE_SPACE, read_text_lines

_WHITE_SPACE_RUN = re.compile(f"[{WHITE_SPACE}]+")


def read_lines(path: FilePath) -> list[str]:
    """Read sentences, one a line.

    Args:
        path: a file of UTF-8 text; unpacked first where its name ends in `.gz`.

    Returns:
        The sentences, without white space at the ends.

    Raises:
        InputError: the file is missing, damaged or not UTF-8; names the line.
    """
    return [line.strip(WHITE_SPACE) for line in read_text_lines(path)]


def refuse_sgm(path: FilePath) -> None:
    """Refuse a file whose lines are sentences between tags, by its name.

    Raises:
        InputError: the name ends in `.sgm` or `.sgm.gz`.
    """
    if str(path).lower().removesuffix(".gz").endswith(".sgm"):
        raise InputError(
            f"{path}: SGM is not read: give the text of its segments, one a line; "
            "examples/wmt14/preprocess.py makes it of WMT14's"
        )


def read_pairs(source: FilePath, target: FilePath) -> tuple[list[str], list[str]]:
    """Read two files that translate each other line by line.

    Args:
        source: the file of the source sentences, as `read_lines` takes it.
        target: the file of their translations.

    Returns:
        The sentences and their translations, two lists of one length.

    Raises:
        InputError: the files differ in length, are empty or SGM; and what `read_lines`
            raises.
    """
    for path in (source, target):
        refuse_sgm(path)
    lines = read_lines(source), read_lines(target)
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} sentences and {target} has {len(lines[1])}: line n of "
            "one has to translate line n of the other"
        )
    if not any(lines[0]) or not any(lines[1]):
        empty = target if any(lines[0]) else source
        raise InputError(f"{empty} holds no sentence: give a file with one sentence a line")
    return lines


def read_tsv(path: FilePath) -> tuple[list[str], list[str]]:
    """Read pairs from a file with `source TAB target` on each line.

    Args:
        path: a file of UTF-8 text; unpacked first where its name ends in `.gz`.

    Returns:
        The sources and the targets, two lists of one length.

    Raises:
        InputError: a line has no tab, or more than one; names it.
    """
    sources, targets = [], []
    for number, line in enumerate(read_text_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise InputError(
                f"{path}, line {number}: expected 'source TAB target', found {len(columns) - 1} "
                "tabs: correct the line"
            )
        sources.append(columns[0].strip(WHITE_SPACE))
        targets.append(columns[1].strip(WHITE_SPACE))
    if not sources:
        raise InputError(f"{path} holds no sentence pair: expected 'source TAB target' lines")
    return sources, targets


def clean_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    max_ratio: float | None = None,
    distinct: bool = False,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Leave out pairs that training is better without.

    Runs of white space become one space first; no-break spaces stay.

    Args:
        sources: sentences.
        targets: their translations.
        max_ratio: how many times more words one side may have; None for any. Sides
            that differ by three words or fewer always pass.
        distinct: whether a pair that came before is left out.

    Returns:
        The sources and the targets that are kept, and the number of pairs that were
        `kept` and left out because `empty`, `uneven` or `repeated`.

    Raises:
        InputError: the lists differ in length.

    Example:

    >>> clean_pairs(["One  two.", ""], ["Un deux.", "Trois."])[:2]
    (['One two.'], ['Un deux.'])
    """
    if len(sources) != len(targets):
        raise InputError(
            f"{len(sources)} sources and {len(targets)} targets cannot be pairs: give lists of "
            "one length"
        )
    kept, seen = [], set()
    counts = dict.fromkeys(("kept", "empty", "uneven", "repeated"), 0)
    for pair in zip(sources, targets):
        pair = tuple(_WHITE_SPACE_RUN.sub(" ", side).strip(" ") for side in pair)
        reason = _reason_against(pair, max_ratio)
        if reason is None and distinct and pair in seen:
            reason = "repeated"
        counts[reason or "kept"] += 1
        if reason is None:
            kept.append(pair)
            seen.add(pair)
    return [source for source, _ in kept], [target for _, target in kept], counts


def _reason_against(pair, max_ratio):
    lengths = sorted(len(side.split()) for side in pair)
    if lengths[0] == 0:
        return "empty"
    if max_ratio is not None and lengths[1] > max(max_ratio * lengths[0], lengths[0] + 3):
        return "uneven"
    return None
