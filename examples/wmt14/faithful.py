"""The examples of the WMT14 sample, by its original's data rules to the letter."""

import collections
import dataclasses
import os

import numpy as np

from dtransformer.datasets import read_tsv
from dtransformer.errors import InputError

UNK, PAD, EOT, FIRST_WORD = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class FaithfulExamples:
    """The sample's examples, as the original sample makes them.

    Attributes:
        source: int32 [N, src_len], never padded.
        target: int32 [N, tgt_len], padded with PAD.
        label: int32 [N, tgt_len], the target shifted left by one, then EOT. Where the
            target is padded the label is PAD too, which a loss has to ignore.
        source_vocabulary: the source's words, and their ids from 3 on.
        target_vocabulary: the target's words, and their ids.
    """

    source: np.ndarray
    target: np.ndarray
    label: np.ndarray
    source_vocabulary: dict[str, int]
    target_vocabulary: dict[str, int]


def faithful_examples(
    path: str | os.PathLike, src_len: int = 10, tgt_len: int = 10, vocab_size: int = 20000
) -> FaithfulExamples:
    """Make examples by the rules of the original sample.

    Words are what `str.split()` gives, so a no-break space separates words too. Each side
    has a vocabulary of all its words in order of frequency, words of one frequency in
    order of their first appearance; ids 0, 1, 2 are UNK, PAD, EOT. Pairs count whose
    source has more than src_len + 1 words; the target may have any number. The order
    is the file's. On newstest2014, French to English, this reading gives the published
    15,736 and 14,399 words and 2,468 pairs.

    Args:
        path: a file of `source TAB target` lines, such as `wmt14.fr_en.txt`.
        src_len: number of words of a source; longer ones are truncated to it.
        tgt_len: number of words of a target, truncated or padded to it.
        vocab_size: size of the model's vocabulary.

    Returns:
        The examples. Labels keep PAD where the target is padded, and a loss has
        to ignore it (`ignore_id=PAD`): the original trained on it.

    Raises:
        InputError: a vocabulary does not fit vocab_size, or no pair is long enough.
    """
    if src_len < 1 or tgt_len < 1:
        raise InputError(f"src_len={src_len} and tgt_len={tgt_len} must be at least 1")
    sides = [[line.split() for line in lines] for lines in read_tsv(path)]
    vocabularies = [_vocabulary(lines) for lines in sides]
    for name, vocabulary in zip(("source", "target"), vocabularies):
        if len(vocabulary) + FIRST_WORD > vocab_size:
            raise InputError(
                f"{path}: the {name} side has {len(vocabulary)} words, which with {FIRST_WORD} "
                f"special ones do not fit vocab_size={vocab_size}: give at least "
                f"--vocab_size {len(vocabulary) + FIRST_WORD}"
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
            f"{path}: no source has more than {src_len + 1} words: give a smaller --src_len"
        )
    arrays = (np.array(rows, "int32") for rows in (sources, targets, labels))
    return FaithfulExamples(*arrays, *vocabularies)


def _vocabulary(lines):
    counts = collections.Counter(word for words in lines for word in words)
    return {word: FIRST_WORD + i for i, (word, _) in enumerate(counts.most_common())}
