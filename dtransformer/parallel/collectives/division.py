"""Division of the elements of a flattened tensor over the ranks of a group, and of items: pure data."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Division:
    """The ranges that the ranks of a group have of a flattened tensor, one after the other.

    Args:
        sizes: for each position of the group the number of elements of its range. The last
            ones may lie beyond the tensor's end, which is padded with zeros.
    """

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, num_elements: int, num_shards: int) -> "Division":
        """Return that into shards of one size.

        Example:

        >>> Division.even(10, 4).sizes
        (3, 3, 3, 3)
        """
        return cls((-(-num_elements // num_shards),) * num_shards)

    @classmethod
    def whole(cls, num_elements: int, num_shards: int, owner: int) -> "Division":
        """Return that in which one position has all elements.

        Example:

        >>> Division.whole(10, 4, owner=2).sizes
        (0, 0, 10, 0)
        """
        return cls(tuple(num_elements * (index == owner) for index in range(num_shards)))

    def range_of(self, index: int) -> tuple[int, int]:
        """Return (start, stop) of what a position has in the flattened, padded tensor."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]


def filled(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Return lists of the positions of items, each filled before the next one is begun.

    Args:
        sizes: of the items.
        most: how much a list may have; an item that is larger has one of its own.

    Example:

    >>> filled([4, 3, 2, 9, 1], 7)
    [[0, 1], [2], [3], [4]]
    """
    lists, total = [], 0
    for position, size in enumerate(sizes):
        if not lists or total + size > most:
            lists.append([])
            total = 0
        lists[-1].append(position)
        total += size
    return lists
