"""Division of flattened tensors over the ranks of a group, and packing of items into lists."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Division:
    """Consecutive ranges of a flattened tensor, one for each rank of a group.

    Args:
        sizes: Tuple of integers. Number of elements of each position's range. The last ranges
            may extend past the end of the tensor, which is then padded with zeros.
    """

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, num_elements: int, num_shards: int) -> "Division":
        """Return a division into shards of equal size.

        Example:

        >>> Division.even(10, 4).sizes
        (3, 3, 3, 3)
        """
        return cls((-(-num_elements // num_shards),) * num_shards)

    @classmethod
    def single_owner(cls, num_elements: int, num_shards: int, owner: int) -> "Division":
        """Return a division that assigns every element to one position.

        Example:

        >>> Division.single_owner(10, 4, owner=2).sizes
        (0, 0, 10, 0)
        """
        return cls(tuple(num_elements * (index == owner) for index in range(num_shards)))

    def get_range(self, index: int) -> tuple[int, int]:
        """Return the `(start, stop)` range of a position in the flattened, padded tensor."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]


def pack_consecutive(sizes: Iterable[int], max_size: int) -> list[list[int]]:
    """Pack items into consecutive lists and return the positions of the items in each list.

    A list is closed when the next item would exceed the limit.

    Args:
        sizes: Iterable of numbers. Sizes of the items.
        max_size: Maximum total size of a list. A larger item gets a separate list.

    Returns:
        A list of lists of item positions.

    Example:

    >>> pack_consecutive([4, 3, 2, 9, 1], 7)
    [[0, 1], [2], [3], [4]]
    """
    lists = []
    total = 0
    for position, size in enumerate(sizes):
        if not lists or total + size > max_size:
            lists.append([])
            total = 0
        lists[-1].append(position)
        total += size
    return lists
