"""Who writes what of a checkpoint: a plan of pure data.

Several ranks may have the same piece of a tensor; one of them writes it, so that each byte is
written once and all ranks write about as much. A part is what one rank writes to one file.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """One file of a checkpoint.

    Args:
        writer: the rank that writes it.
        keys: tuple of the pieces, each (name, box).
        copy_of: number of the part that it is a replica of; None where it is none.
    """

    writer: int
    keys: tuple
    copy_of: int | None = None


def plan_parts(held, with_replicas=False):
    """Return the list of `Part`s; replicas come last.

    Args:
        held: list with a dict for each rank: (name, box) of a piece, and its bytes.
        with_replicas: whether pieces that several ranks have are written twice, by
            different ranks. All pieces of a part are the same ranks' then.
    """
    holders = {}
    for rank, pieces in enumerate(held):
        for key in pieces:
            holders.setdefault(key, []).append(rank)
    own, load = [[] for _ in held], [0] * len(held)
    # What one rank alone has comes first, then the largest.
    order = sorted(
        holders, key=lambda key: (len(holders[key]) > 1, -held[holders[key][0]][key], key)
    )
    for key in order:
        writer = min(holders[key], key=lambda rank: (load[rank], rank))
        load[writer] += held[writer][key]
        own[writer].append(key)
    parts = []
    for rank, keys in enumerate(own):
        groups = {}
        for key in keys:
            groups.setdefault(tuple(holders[key]) if with_replicas else None, []).append(key)
        parts += [Part(rank, tuple(sorted(groups[kind]))) for kind in sorted(groups)]
    if not with_replicas:
        return parts
    return parts + [
        Part(rank, part.keys, number)
        for number, part in enumerate(parts)
        for rank in _others_with(part, held)[:1]
    ]


def _others_with(part, held):
    """Return the other ranks that have all of a part, the next ones first."""
    ranks = [(part.writer + step) % len(held) for step in range(1, len(held))]
    return [rank for rank in ranks if all(key in held[rank] for key in part.keys)]
