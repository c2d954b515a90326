"""Sentence pairs of a real text for the contestants.

All environments import this file, so it needs only NumPy. The variable `DTRANSFORMER_SENTENCES` names
a file with the arrays source, source_ends, target and target_ends.
"""

import dataclasses
import os

import numpy as np
from workloads import Workload

PAD, START, END = 0, 2, 3


@dataclasses.dataclass(frozen=True)
class Sentences(Workload):
    """The translation model, trained on real sentences. A "step" is one pass over all sentences.

    Args:
        batch_size: Number of pairs in a padded batch.
        num_batches: Number of batches, and of updates, in a pass.
        length: Number of tokens in a row of packed sentences. No sentence is longer.
    """

    batch_size: int = 128
    num_batches: int = 4
    length: int = 128

    def pairs(self):
        """Return the ids of both sides as lists of int arrays."""
        arrays = np.load(os.environ["DTRANSFORMER_SENTENCES"])
        num_pairs = self.batch_size * self.num_batches
        return [
            np.split(arrays[side], arrays[f"{side}_ends"])[:num_pairs]
            for side in ("source", "target")
        ]

    @property
    def tokens(self):
        """Number of source tokens and labels in a pass, without padding."""
        source, target = self.pairs()
        return sum(map(len, source)) + sum(len(ids) + 1 for ids in target)

    def padded(self, by_length):
        """Return the batches (source, target, labels), each padded to its longest sentence.

        Args:
            by_length: whether sentences of about the same length share a batch.
        """
        source, target = self.pairs()
        order = np.arange(len(source))
        if by_length:
            order = np.argsort([max(len(s), len(t)) for s, t in zip(source, target)], kind="stable")
        batches = []
        for rows in np.split(order, self.num_batches):
            columns = [source[i] for i in rows], [[START, *target[i]] for i in rows]
            batches.append([_padded(ids) for ids in (*columns, [[*target[i], END] for i in rows])])
        return batches


def _padded(rows):
    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=PAD) for row in rows])
