"""Random choices that come out alike on every machine and in every Python."""

import bisect
import itertools
import random


class Draw:
    """Draws from tables, from a seed.

    Uses only the bits of the Mersenne Twister and integer arithmetic: the helpers of
    `random.Random` may draw differently in another Python version.

    Args:
        seed: an integer.

    Example:

    >>> Draw(seed=1).below(6) in range(6)
    True
    """

    def __init__(self, seed):
        self._bits = random.Random(seed).getrandbits

    def below(self, number):
        """Returns an integer from 0 to `number - 1`."""
        return (self._bits(32) * number) >> 32

    def between(self, low, high):
        """Returns an integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent):
        """Returns True in `percent` of a hundred cases."""
        return self.below(100) < percent

    def choice(self, options):
        """Returns one item of a sequence."""
        return options[self.below(len(options))]

    def weighted(self, table):
        """Returns one option of a `Weighted` table."""
        return table.options[bisect.bisect(table.sums, self.below(table.sums[-1]))]

    def shuffle(self, items):
        """Puts a list into random order, in place."""
        for index in range(len(items) - 1, 0, -1):
            other = self.below(index + 1)
            items[index], items[other] = items[other], items[index]


class Weighted:
    """Options with integer weights.

    Args:
        weights: a dict or a sequence of pairs from option to weight.
    """

    def __init__(self, weights):
        pairs = tuple(weights.items() if isinstance(weights, dict) else weights)
        self.options = tuple(option for option, _ in pairs)
        self.sums = tuple(itertools.accumulate(weight for _, weight in pairs))
