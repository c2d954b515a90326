"""Sentences and sentence pairs from files, and the cleaning of pairs."""

import gzip
import re
import zlib

from dtransformer.datasets.sgm import decode_lines, pair_sgm, parse_sgm, read_bytes
from dtransformer.errors import InputError

# A no-break space is text: it may stand between French words and punctuation.
_WHITE_SPACE = " \t\v\f\r\n"
_WHITE_SPACE_RUN = re.compile(f"[{_WHITE_SPACE}]+")


def read_lines(path):
    """Reads sentences, one a line.

    Args:
        path: A file of UTF-8 text, or of SGM where its name ends in `.sgm`; unpacked
            first where it ends in `.gz`.

    Returns:
        A list of strings, without white space at the ends.

    Raises:
        InputError: The file is missing, damaged or not UTF-8; names the line.
    """
    lines = _decoded_lines(path)
    if _is_sgm(path):
        return parse_sgm(lines, path)
    return [line.strip(_WHITE_SPACE) for line in lines]


def read_pairs(source, target):
    """Reads two files that translate each other line by line.

    Args:
        source: File of the source sentences, as `read_lines` takes it.
        target: File of their translations.

    Returns:
        Two lists of strings of one length.

    Raises:
        InputError: The files differ in length or are empty, and what `read_lines`
            raises.
    """
    if _is_sgm(source) and _is_sgm(target):  # names the first line that does not match
        pairs = pair_sgm(_decoded_lines(source), _decoded_lines(target), source, target)
        lines = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        lines = read_lines(source), read_lines(target)
    if len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{source} has {len(lines[0])} sentences and {target} has {len(lines[1])}: line n of "
            "one has to translate line n of the other."
        )
    if not any(lines[0]) or not any(lines[1]):
        empty = target if any(lines[0]) else source
        raise InputError(f"{empty} holds no sentence: name a file with one sentence a line.")
    return lines


def read_tsv(path):
    """Reads pairs from a file with `source TAB target` on each line.

    Args:
        path: A file of UTF-8 text; unpacked first where its name ends in `.gz`.

    Returns:
        Two lists of strings of one length.

    Raises:
        InputError: A line has no tab, or more than one; names it.
    """
    sources, targets = [], []
    for number, line in enumerate(_decoded_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise InputError(
                f"{path}, line {number}: expected 'source TAB target', found {len(columns) - 1} "
                "tabs: mend the line."
            )
        sources.append(columns[0].strip(_WHITE_SPACE))
        targets.append(columns[1].strip(_WHITE_SPACE))
    if not sources:
        raise InputError(f"{path} holds no sentence pair: expected 'source TAB target' lines.")
    return sources, targets


def clean_pairs(sources, targets, max_words=None, max_ratio=None, distinct=False):
    """Leaves out pairs that training is better without.

    Runs of white space become one space first; no-break spaces stay.

    Args:
        sources: List of strings.
        targets: List of strings, their translations.
        max_words: The most words of a side; None for any number.
        max_ratio: How many times more words one side may have; None for any. Sides
            that differ by three words or fewer always pass.
        distinct: Whether a pair that stood before is left out.

    Returns:
        The sources and the targets that are kept, and a dict that counts the pairs
        `kept` and left out because `empty`, `too_long`, `uneven` or `repeated`.

    Raises:
        InputError: The lists differ in length.

    Example:
        >>> clean_pairs(["One  two.", ""], ["Un deux.", "Trois."])[:2]
        (['One two.'], ['Un deux.'])
    """
    if len(sources) != len(targets):
        raise InputError(
            f"{len(sources)} sources and {len(targets)} targets cannot be pairs: give lists of "
            "one length."
        )
    kept, seen = [], set()
    counts = dict.fromkeys(("kept", "empty", "too_long", "uneven", "repeated"), 0)
    for pair in zip(sources, targets):
        pair = tuple(_WHITE_SPACE_RUN.sub(" ", side).strip(" ") for side in pair)
        reason = _reason_against(pair, max_words, max_ratio)
        if reason is None and distinct and pair in seen:
            reason = "repeated"
        counts[reason or "kept"] += 1
        if reason is None:
            kept.append(pair)
            seen.add(pair)
    return [source for source, _ in kept], [target for _, target in kept], counts


def _reason_against(pair, max_words, max_ratio):
    lengths = sorted(len(side.split()) for side in pair)
    if lengths[0] == 0:
        return "empty"
    if max_words is not None and lengths[1] > max_words:
        return "too_long"
    if max_ratio is not None and lengths[1] > max(max_ratio * lengths[0], lengths[0] + 3):
        return "uneven"
    return None


def _decoded_lines(path):
    data = read_bytes(path)
    if str(path).endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path} is no complete gzip file ({error}): copy or pack it again."
            ) from None
    return decode_lines(data, path)


def _is_sgm(path):
    return str(path).removesuffix(".gz").endswith(".sgm")
