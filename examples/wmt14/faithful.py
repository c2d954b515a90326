"""Training examples of the WMT14 sample, with the exact data rules of the original."""

import collections
import dataclasses
import os

import numpy as np

from dtransformer.datasets import read_tsv
from dtransformer.errors import InputError

UNK, PAD, EOT, FIRST_WORD = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class FaithfulExamples:
    """Examples in the form of the original sample.

    Attributes:
        source: Source ids, int32 [N, src_len], never padded.
        target: Target ids, int32 [N, tgt_len], padded with PAD.
        label: The target shifted left by one, then EOT, int32 [N, tgt_len]. Labels of padding
            are PAD, and the loss must ignore them.
        source_vocabulary: Dict of source words and their ids, which start at 3.
        target_vocabulary: Dict of target words and their ids.
    """

    source: np.ndarray
    target: np.ndarray
    label: np.ndarray
    source_vocabulary: dict[str, int]
    target_vocabulary: dict[str, int]


def faithful_examples(
    path: str | os.PathLike, src_len: int = 10, tgt_len: int = 10, vocab_size: int = 20000
) -> FaithfulExamples:
    """Create examples with the rules of the original sample.

    `str.split()` separates words, also at no-break spaces. Each side has a vocabulary of all
    its words, sorted by frequency and then by first appearance. Ids 0, 1 and 2 are UNK, PAD
    and EOT. Pairs are used in file order if their source has more than src_len + 1 words.
    For newstest2014, French to English, this results in the published 15,736 and 14,399
    words and 2,468 pairs.

    Args:
        path: File of `source TAB target` lines, such as `wmt14.fr_en.txt`.
        src_len: Integer. Words per source; longer sources are truncated.
        tgt_len: Integer. Words per target; targets are truncated or padded.
        vocab_size: Integer. Size of the model's vocabulary.

    Returns:
        A `FaithfulExamples`. Labels of padding are PAD. Use a loss with `ignore_id=PAD`,
        although the original trained on these labels.

    Raises:
        InputError: If a vocabulary does not fit vocab_size, or no pair is long enough.
    """
    if src_len < 1 or tgt_len < 1:
        raise InputError(f"src_len={src_len} and tgt_len={tgt_len} must be at least 1")
    sides = [[line.split() for line in lines] for lines in read_tsv(path)]
    vocabularies = [_vocabulary(lines) for lines in sides]
    for name, vocabulary in zip(("source", "target"), vocabularies):
        if len(vocabulary) + FIRST_WORD > vocab_size:
            raise InputError(
                f"{path}: the {name} side has {len(vocabulary)} words and {FIRST_WORD} special "
                f"tokens, which do not fit vocab_size={vocab_size}. Use --vocab_size "
                f"{len(vocabulary) + FIRST_WORD} or more."
            )
    sources, targets, labels = [], [], []
    for source, target in zip(*sides):
        if len(source) <= src_len + 1:
            continue
        sources.append([vocabularies[0][word] for word in source[:src_len]])
        target = [vocabularies[1][word] for word in target[:tgt_len]]
        target += [PAD] * (tgt_len - len(target))
        targets.append(target)
        labels.append([*target[1:], EOT])
    if not sources:
        raise InputError(
            f"{path}: no source has more than {src_len + 1} words. Use a smaller --src_len."
        )
    arrays = (np.array(rows, "int32") for rows in (sources, targets, labels))
    return FaithfulExamples(*arrays, *vocabularies)


def _vocabulary(lines):
    counts = collections.Counter(word for words in lines for word in words)
    return {word: FIRST_WORD + i for i, (word, _) in enumerate(counts.most_common())}
