"""Save plan: which rank writes which shards of a checkpoint, pure data.

Several ranks may hold the same shard of a tensor. One of them writes it, so that each byte is
written once and all ranks write about the same number of bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dtransformer.parallel.weights.shard_bounds import Bounds

ShardKey = tuple[str, Bounds]  # a tensor's name, and the shard's bounds in it


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file of a checkpoint, which one rank writes.

    Args:
        writer: the rank.
        shards: which shards are in it, by tensor name and bounds.
        replica_of: index in the plan of the file that it repeats; None where it is no replica.
    """

    writer: int
    shards: tuple[ShardKey, ...]
    replica_of: int | None = None


def plan_files(
    rank_shards: Sequence[Mapping[ShardKey, int]], with_replicas: bool = False
) -> list[DataFile]:
    """Return the files of a checkpoint, replicas last.

    Args:
        rank_shards: for each rank the shards that it holds, and their bytes.
        with_replicas: whether shards that several ranks hold are written twice, by different
            ranks. All shards of a file then belong to the same ranks.

    Example:

    >>> left, right, gamma = ("w", ((0, 4),)), ("w", ((4, 8),)), ("gamma", ((0, 2),))
    >>> for file in plan_files([{left: 16, gamma: 8}, {right: 16, gamma: 8}]):
    ...     print(file.writer, [name for name, _ in file.shards])
    0 ['gamma', 'w']
    1 ['w']
    """
    holders = {}
    for rank, shards in enumerate(rank_shards):
        for key in shards:
            holders.setdefault(key, []).append(rank)
    chosen, load = [[] for _ in rank_shards], [0] * len(rank_shards)
    # First the shards that a single rank holds, then the largest.
    order = sorted(
        holders, key=lambda key: (len(holders[key]) > 1, -rank_shards[holders[key][0]][key], key)
    )
    for key in order:
        writer = min(holders[key], key=lambda rank: (load[rank], rank))
        load[writer] += rank_shards[writer][key]
        chosen[writer].append(key)
    files = []
    for rank, keys in enumerate(chosen):
        groups = {}
        for key in keys:
            groups.setdefault(tuple(holders[key]) if with_replicas else None, []).append(key)
        files += [DataFile(rank, tuple(sorted(groups[ranks]))) for ranks in sorted(groups)]
    if not with_replicas:
        return files
    return files + [
        DataFile(rank, file.shards, index)
        for index, file in enumerate(files)
        for rank in _other_holders(file, rank_shards)[:1]
    ]


def _other_holders(file, rank_shards):
    """Return the other ranks that hold all shards of a file, the next ones first."""
    ranks = [(file.writer + step) % len(rank_shards) for step in range(1, len(rank_shards))]
    return [rank for rank in ranks if all(key in rank_shards[rank] for key in file.shards)]
