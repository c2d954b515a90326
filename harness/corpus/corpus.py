"""Corpus of distinct sentence pairs, drawn from the patterns."""

import random

from harness.corpus.sentences import PATTERNS


class Draw:
    """Random draws that are identical in every Python version.

    Of the module `random`, only `random()` guarantees reproducible values.
    """

    def __init__(self, seed):
        self._random = random.Random(seed).random

    def below(self, limit):
        """Return an integer from 0 to `number - 1`."""
        return int(self._random() * limit)

    def chance(self, percent):
        """Return True with a probability of `percent` / 100."""
        return self.below(100) < percent

    def choice(self, options):
        """Return one item of a sequence."""
        return options[self.below(len(options))]


def drawn_pairs(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return a list of distinct sentence pairs (English, French)."""
    draw, pairs, seen = Draw(seed), [], set()
    while len(pairs) < num_pairs:
        pair = draw.choice(PATTERNS)(draw)
        # Two English sentences may share a French one ("him" and "her" are "lui"): the first
        # drawn stays, so that held-out sentences are new in both languages.
        if seen.isdisjoint(pair):
            seen.update(pair)
            pairs.append(pair)
    return pairs
